"""How torch's work gets onto a device's stream and into its memory, on a GPU and on the processor."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.mapped_memory import WholeMemory
from tide_runtime.machine_cache import processor

_ALIGNMENT = 256  # bytes


class TorchStream(Protocol):
    """The stream of ``device`` for torch. ``place``: torch's name of the device."""

    device: Device
    place: torch.device
    kernels: Any  # the module `fused_kernels`, or None

    def memory(self, pointer: int, count_bytes: int) -> Tensor:
        """The bytes at a device address, which their owner keeps, as a tensor."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue what ``work`` computes."""

    def wait_for_weights(self) -> None:
        """Wait for what was computed outside of `run`."""


class _DeviceBytes:
    """Memory as the CUDA array interface describes it (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html)."""

    def __init__(self, pointer: int, count_bytes: int) -> None:
        data = (pointer, False)
        self.__cuda_array_interface__ = {"data": data, "shape": (count_bytes,), "typestr": "|u1", "strides": None, "version": 3}


class CudaStream:
    """A GPU's stream.

    Intermediate tensors come from a memory pool of this object's own, so that torch allocates no other tensor where a captured
    graph writes. All work is on one stream, in order: later captures and runs take the same blocks again. cuBLAS gets torch's
    workspaces, one for each handle and stream, so captures hold kernels and memsets, and no allocations.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = torch.device("cuda", device.ordinal)
        self._stream = torch.cuda.ExternalStream(device.stream, self.place)
        with torch.cuda.device(self.place):
            self._pool, self.kernels = torch.cuda.MemPool(), _fused_kernels(self.place)

    def memory(self, pointer: int, count_bytes: int) -> Tensor:
        return torch.as_tensor(_DeviceBytes(pointer, count_bytes), device=self.place)

    def run(self, work: Callable[[], None]) -> None:
        attention = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])  # the others take no mask, or choose lazily
        with torch.inference_mode(), torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool, self.place), attention:
            work()

    def wait_for_weights(self) -> None:
        torch.cuda.synchronize(self.place)


def _fused_kernels(place: torch.device) -> Any:
    """The module `fused_kernels` where Triton compiles for the GPU: from Ampere on, with a C compiler."""
    if torch.cuda.get_device_capability(place) < (8, 0):
        return None
    try:
        from tide_runtime.backends.torch import fused_kernels
        from tide_runtime.backends.torch.kernel_check import compare_kernels

        compare_kernels(fused_kernels, place)
    except Exception as error:  # each of Triton's parts has errors of its own
        slower = f"Triton does not run here ({error}), so target torch runs each operator as a kernel of its own, which is slower"
        warnings.warn(slower, RuntimeWarning, stacklevel=2)
        return None
    return fused_kernels


class ProcessorStream:
    """The processor: work runs at once."""

    kernels = None

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = torch.device("cpu")

    def memory(self, pointer: int, count_bytes: int) -> Tensor:
        return torch.frombuffer((ctypes.c_uint8 * count_bytes).from_address(pointer), dtype=torch.uint8)

    def run(self, work: Callable[[], None]) -> None:
        with torch.inference_mode():
            work()

    def wait_for_weights(self) -> None:
        """Nothing is queued."""


class _HostMemory:
    def __init__(self, count_bytes: int) -> None:
        self._bytes = np.zeros(count_bytes + _ALIGNMENT, np.uint8)
        self.pointer = self._bytes.ctypes.data + -self._bytes.ctypes.data % _ALIGNMENT


class _Done:
    def wait(self) -> None:
        """Nothing is queued."""


class ProcessorDevice:
    """`Device` whose memory is the process's: everything is done when a call returns."""

    kind = "cpu"
    ordinal = 0
    stream = 0
    is_capturing = False

    def __init__(self) -> None:
        self.name = processor()
        self.lock: AbstractContextManager[Any] = RLock()

    def use(self) -> None:
        """The processor needs no choice."""

    def allocate(self, count_bytes: int) -> _HostMemory:
        return _HostMemory(count_bytes)

    def reserve(self, count_bytes: int) -> WholeMemory:
        return WholeMemory(self.allocate(count_bytes), count_bytes)  # zeros that are never written take no memory

    def free_memory(self) -> None:
        """The process's memory is not counted."""

    def zero(self, pointer: int, count_bytes: int) -> None:
        ctypes.memset(pointer, 0, count_bytes)

    def pinned(self, count_bytes: int) -> NDArray[np.uint8]:
        return np.zeros(count_bytes, np.uint8)

    def upload(self, pointer: int, source: NDArray[Any]) -> None:
        ctypes.memmove(pointer, source.ctypes.data, source.nbytes)

    def upload_copy(self, pointer: int, source: NDArray[Any]) -> None:
        self.upload(pointer, np.ascontiguousarray(source))

    def download(self, target: NDArray[Any], pointer: int) -> None:
        ctypes.memmove(target.ctypes.data, pointer, target.nbytes)

    def copy(self, target: int, source: int, count_bytes: int) -> None:
        ctypes.memmove(target, source, count_bytes)

    def copy_strided(
        self, target: int, source: int, pitch: int, width: int, height: int, source_pitch: int | None = None
    ) -> None:
        for row in reversed(range(height)):
            ctypes.memmove(target + row * pitch, source + row * (source_pitch or pitch), width)

    def mark(self) -> _Done:
        return _Done()

    def synchronize(self) -> None:
        """Nothing is queued."""
