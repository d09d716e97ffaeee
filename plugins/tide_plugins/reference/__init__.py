"""NumPy references of the kernels in float64, for tests on the host and on a GPU."""

from tide_plugins.reference.numpy_exit_router import exit_router

__all__ = ["exit_router"]
