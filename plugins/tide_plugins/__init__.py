"""CUDA kernels of early exits: sources in `csrc/`, compiled in `build/`, launched from `launch/`."""
