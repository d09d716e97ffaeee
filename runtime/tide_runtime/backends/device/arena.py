"""Several device buffers in one allocation: `Arena`, `DeviceBuffers` of steps, and `TransferBlock`, which the host fills."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tide_runtime.backends.device.device import Device, Mark

Layout = dict[str, tuple[tuple[int, ...], type[np.generic]]]  # name → shape, dtype
ALIGNMENT = 256  # bytes; the alignment of CUDA allocations, kept for every buffer


def aligned(count_bytes: int) -> int:
    return -(-count_bytes // ALIGNMENT) * ALIGNMENT


def layout_bytes(shapes: Mapping[str, tuple[tuple[int, ...], DTypeLike]]) -> dict[str, int]:
    """Bytes of each array in ``shapes`` (name → shape, dtype)."""
    return {name: prod(shape) * np.dtype(dtype).itemsize for name, (shape, dtype) in shapes.items()}


def layout(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Byte offset of each buffer in ``sizes`` (name → bytes), in order, and the total size."""
    offsets = {}
    end = 0
    for name, count_bytes in sizes.items():
        offsets[name] = end
        end += aligned(count_bytes)
    return offsets, max(end, ALIGNMENT)


class Arena:
    """Zero-initialized device memory for ``sizes`` (name → bytes), freed with this object.

    ``pointers`` maps names to device addresses; ``pointer`` is the start. Raises TargetError when the device is out of memory.
    """

    def __init__(self, device: Device, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        offsets, self.bytes = layout(sizes)
        self._memory = device.allocate(self.bytes)
        self.pointer = self._memory.pointer
        self.pointers = {name: self.pointer + offset for name, offset in offsets.items()}


class DeviceBuffers:
    """Arenas for graph outputs, shared by the steps of all shapes; a step keeps the arenas it was bound to alive."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arenas = dict[tuple[str, ...], Arena]()

    def get(self, **sizes: int) -> Arena:
        """An arena with at least ``sizes`` (name → bytes); repeated calls return the same one while it is large enough."""
        names = tuple(sizes)
        arena = self._arenas.get(names)
        if arena is None or any(size > arena.sizes[name] for name, size in sizes.items()):
            known = arena.sizes if arena is not None else {}
            arena = Arena(self._device, {name: _grown(known.get(name, 0), size) for name, size in sizes.items()})
            self._arenas[names] = arena
        return arena


def _grown(known: int, needed: int) -> int:
    """``known``, at least doubled if it is less than ``needed``: geometric growth makes reallocations rare."""
    return known if needed <= known else max(needed, 2 * known)


class TransferBlock:
    """Small arrays that the host fills and sends to the device as one copy.

    ``host``: the arrays of ``shapes`` (name → shape, dtype) in pinned memory; ``pointers``: their copies on the device.
    """

    def __init__(self, device: Device, shapes: Mapping[str, tuple[tuple[int, ...], DTypeLike]]) -> None:
        sizes = layout_bytes(shapes)
        self._device = device
        self._arena = Arena(device, sizes)
        self._bytes = device.pinned(self._arena.bytes)
        self._sent = cast(Mark | None, None)
        self.pointers = self._arena.pointers
        self.host: dict[str, NDArray[Any]] = {}
        for name, (shape, dtype) in shapes.items():
            offset = self.pointers[name] - self._arena.pointer
            self.host[name] = self._bytes[offset : offset + sizes[name]].view(dtype).reshape(shape)

    def wait_until_writable(self) -> None:
        """Wait until the copy of the last `send`, which is asynchronous, has read the host arrays."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = None

    def send(self) -> None:
        """Queue the copy to the device."""
        self._device.upload(self._arena.pointer, self._bytes)
        self._sent = self._device.mark()
