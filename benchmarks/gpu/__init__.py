"""Checks and timings of the CUDA kernels.

Without a GPU each script prepares everything up to the launch, prints that nothing ran, and exits with 2.
"""
