"""Pinned memory through which arrays of the caller go to a device, kept: allocating it waits for all work of the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.device.device import Device, Mark

_SLOTS = 4  # uploads that may be under way before one has to wait


@dataclass
class _Slot:
    memory: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    sent: Mark | None = None


class StagingRing:
    """Slots of pinned memory in turn. A slot is written again when the copy from it is done."""

    def __init__(self) -> None:
        self._slots = cycle([_Slot() for _ in range(_SLOTS)])

    def upload(self, device: Device, pointer: int, source: NDArray[Any]) -> None:
        """Queue a copy of ``source``, which may change when this returns."""
        with device.lock:
            assert not device.is_capturing, "every launch of the graph would copy what the slot holds by then"
            slot = next(self._slots)
            if slot.sent is not None:
                slot.sent.wait()
            if slot.memory.size < source.nbytes:
                slot.memory = device.pinned(max(source.nbytes, 2 * slot.memory.size))
            staged = slot.memory[: source.nbytes]
            staged.view(source.dtype).reshape(source.shape)[...] = source
            device.upload(pointer, staged)
            slot.sent = device.mark()
