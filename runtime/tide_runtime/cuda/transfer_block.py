"""Small arrays that the host fills for every step, sent to the device as one copy."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tide_runtime.cuda.device import Device, Mark

ALIGNMENT = 256  # of every array, as of an allocation


def aligned(count_bytes: int) -> int:
    return -(-count_bytes // ALIGNMENT) * ALIGNMENT


class TransferBlock:
    """Arrays ``shapes`` (name → shape, dtype): ``host`` in pinned memory, ``pointers`` to their copies on the device."""

    def __init__(self, device: Device, shapes: Mapping[str, tuple[tuple[int, ...], DTypeLike]]) -> None:
        self._device = device
        places, end = {}, 0
        for name, (shape, dtype) in shapes.items():
            places[name] = end
            end += aligned(prod(shape) * np.dtype(dtype).itemsize)
        self._bytes = device.pinned(max(end, ALIGNMENT))
        self._memory = device.allocate(max(end, ALIGNMENT))
        self._sent: Mark | None = None
        self.pointers = {name: self._memory.pointer + place for name, place in places.items()}
        self.host: dict[str, NDArray[Any]] = {}
        for name, (shape, dtype) in shapes.items():
            count_bytes = prod(shape) * np.dtype(dtype).itemsize
            self.host[name] = self._bytes[places[name] : places[name] + count_bytes].view(dtype).reshape(shape)

    def wait_until_writable(self) -> None:
        """The last `send` reads the host's arrays some time after it returns."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = None

    def send(self) -> None:
        """Queue the copy to the device."""
        self._device.upload(self._memory.pointer, self._bytes)
        self._sent = self._device.mark()
