"""The CUDA libraries of ONNX Runtime's CUDA provider.

``libonnxruntime_providers_cuda.so`` of onnxruntime-gpu 1.31.1 names four of them as needed (``readelf -d``), has no search path
of its own, and opens cuDNN when a graph has a reduction such as ReduceMax (onnxruntime pull request 29252). The wheels that
``tide-llm[cuda]`` installs hold them in folders that the dynamic linker does not search; once loaded, they are found by name.
"""

from __future__ import annotations

import ctypes
import io
import sys
from contextlib import redirect_stdout

import onnxruntime as ort

# Both packages install the module onnxruntime, and tide-llm requires the one without CUDA kernels. It stays registered, with the
# other one's files over its own, so that pip does not install it again with the next package that requires it.
INSTALL_PROVIDER = "pip install --force-reinstall --no-deps onnxruntime-gpu"
_NEEDED = ("libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudnn.so.9")


def missing_cuda_libraries() -> list[str]:
    """Load the provider's libraries from the installed wheels or the system; returns the reason for each that cannot be loaded.

    Reasons are not known on Windows.
    """
    with redirect_stdout(io.StringIO()):  # it prints what it does not find in wheels, although a system may have it
        ort.preload_dlls()
    if sys.platform != "linux":
        return []
    reasons = []
    for name in _NEEDED:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    return reasons
