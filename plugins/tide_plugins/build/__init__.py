"""Compilation of the kernels: NVRTC discovery, compilation, resource reports, and a cache of images."""
