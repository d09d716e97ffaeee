"""Checks and timings of the CUDA kernels. Without a GPU each script goes up to the launch, says so, and exits with 2."""
