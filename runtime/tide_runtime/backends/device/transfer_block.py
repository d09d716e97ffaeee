"""Small arrays that the host fills for every step, sent to the device as one copy."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tide_runtime.backends.device.arena import Arena
from tide_runtime.backends.device.device import Device, Mark


class TransferBlock:
    """Arrays ``shapes`` (name → shape, dtype): ``host`` in pinned memory, ``pointers`` to their copies on the device."""

    def __init__(self, device: Device, shapes: Mapping[str, tuple[tuple[int, ...], DTypeLike]]) -> None:
        sizes = {name: prod(shape) * np.dtype(dtype).itemsize for name, (shape, dtype) in shapes.items()}
        self._device, self._arena = device, Arena(device, sizes)
        self._bytes, self._sent = device.pinned(self._arena.bytes), cast(Mark | None, None)
        self.pointers = self._arena.pointers
        self.host: dict[str, NDArray[Any]] = {}
        for name, (shape, dtype) in shapes.items():
            place = self.pointers[name] - self._arena.pointer
            self.host[name] = self._bytes[place : place + sizes[name]].view(dtype).reshape(shape)

    def wait_until_writable(self) -> None:
        """The last `send` reads the host's arrays some time after it returns."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = None

    def send(self) -> None:
        """Queue the copy to the device."""
        self._device.upload(self._arena.pointer, self._bytes)
        self._sent = self._device.mark()
