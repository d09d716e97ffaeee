"""Many buffers in one allocation, at places that are known before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping

from tide_runtime.backends.device.device import Device

ALIGNMENT = 256  # of every buffer, as of an allocation


def aligned(count_bytes: int) -> int:
    return -(-count_bytes // ALIGNMENT) * ALIGNMENT


def layout(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offset of each buffer (name → bytes), in order, and the bytes of all."""
    places, end = {}, 0
    for name, count_bytes in sizes.items():
        places[name] = end
        end += aligned(count_bytes)
    return places, max(end, ALIGNMENT)


class Arena:
    """Device memory for ``sizes`` (name → bytes), zero at first; ``pointers``: address of each, ``pointer``: of the first.

    Freed with this object.

    Raises TargetError when the device has not so much.
    """

    def __init__(self, device: Device, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        places, self.bytes = layout(sizes)
        self._memory = device.allocate(self.bytes)
        self.pointer = self._memory.pointer
        self.pointers = {name: self.pointer + place for name, place in places.items()}
