"""Detection of the GPU through the driver library, without any CUDA package."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass

_NAME_BYTES = 256
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class PresentGpu:
    """A GPU of this machine. ``compute``: compute capability times ten, 89 is 8.9."""

    name: str
    compute: int


def runs_code_for(compiled: Collection[int], gpu: int) -> bool:
    """Whether a GPU of capability ``gpu`` runs binaries compiled for one of ``compiled``.

    It runs those of its major version with the same or a lower minor version.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#binary-compatibility
    """
    return any(one // 10 == gpu // 10 and one <= gpu for one in compiled)


def driver_cuda() -> int | None:
    """The newest CUDA release that the driver runs, as 1000 · major + 10 · minor; None without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found = ctypes.c_int()
    return found.value if cuda.cuDriverGetVersion(ctypes.byref(found)) == 0 else None


def present_gpu(ordinal: int = 0) -> PresentGpu | None:
    """GPU number ``ordinal``, or None without a driver or such a GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    calls = (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGet(ctypes.byref(device), ordinal),
        lambda: cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device),
        lambda: cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device),
        lambda: cuda.cuDeviceGetName(name, _NAME_BYTES, device),
    )
    if any(call() != 0 for call in calls):
        return None
    return PresentGpu(name.value.decode(errors="replace"), 10 * major.value + minor.value)
