"""A case's host arrays as device memory, with the same strides and the same sharing of memory, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tide_plugins.launch.device_array import DeviceArray

Array = NDArray[Any]
_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "int64": "i64", "uint64": "u64", "uint8": "u8"}


class CopyingGpu(Protocol):
    """What copying needs of a GPU; all calls wait until they are done."""

    def allocate(self, count_bytes: int) -> int:
        """Device memory of exactly that size, which memcheck then guards; freed when the GPU is closed."""

    def upload(self, pointer: int, source: Array) -> None: ...

    def download(self, target: Array, pointer: int) -> None: ...


class DeviceCopy:
    """Device copies of ``tensors``. Arrays that are views of one buffer stay views of one buffer."""

    def __init__(self, gpu: CopyingGpu, tensors: Mapping[str, Array]) -> None:
        self._gpu, self._tensors = gpu, dict(tensors)
        self._buffers: dict[int, tuple[Array, int]] = {}  # id of the host buffer → it and its device address
        for array in tensors.values():
            buffer = _buffer(array)
            if id(buffer) not in self._buffers:
                self._buffers[id(buffer)] = (buffer, gpu.allocate(max(buffer.nbytes, 1)))
        self.arrays = {name: self._device_array(array) for name, array in tensors.items()}

    def upload(self) -> None:
        """Bring the device's copies to what the host arrays hold."""
        for buffer, pointer in self._buffers.values():
            if buffer.nbytes:
                self._gpu.upload(pointer, buffer)

    def download(self) -> dict[str, Array]:
        """New host arrays with the device's values; the ones that were uploaded stay as they are."""
        copies = {key: np.empty(buffer.nbytes, np.uint8) for key, (buffer, _) in self._buffers.items()}
        for key, (_, pointer) in self._buffers.items():
            if copies[key].size:
                self._gpu.download(copies[key], pointer)
        return {name: _same_view(array, copies[id(_buffer(array))]) for name, array in self._tensors.items()}

    def _device_array(self, array: Array) -> DeviceArray:
        buffer, pointer = self._buffers[id(_buffer(array))]
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return DeviceArray(pointer + _offset(array, buffer), array.shape, _NAMES[str(array.dtype)], 0, strides)


def _buffer(array: Array) -> Array:
    """The array that owns the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _offset(array: Array, buffer: Array) -> int:
    return int(array.__array_interface__["data"][0] - buffer.__array_interface__["data"][0])


def _same_view(array: Array, content: Array) -> Array:
    """The view of the bytes ``content`` that ``array`` is of its own buffer."""
    if not array.size:
        return np.empty_like(array)
    return np.ndarray(array.shape, array.dtype, content, _offset(array, _buffer(array)), array.strides)
