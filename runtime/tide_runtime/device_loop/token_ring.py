"""Ring buffer of generated tokens in pinned memory, which the device writes and the host reads without a copy.

The counters that its kernels read and increment are in device memory: a read over PCIe would take microseconds in every turn.
"""

from __future__ import annotations

import numpy as np

from tide_runtime.backends.device.arena import Arena
from tide_runtime.backends.device.device import Device
from tide_runtime.errors import TideError

NO_TOKEN = -1
EXIT_UNIT = 1 << 32  # bits from here on hold the number of the exit that the token took


def exit_and_token(value: int) -> tuple[int, int]:
    """Split a ring value into the number of the exit that the token took (0: none) and the token."""
    return divmod(value, EXIT_UNIT)


class TokenRing:
    """Ring of the last R turns, and counters.

    ``entries`` [R, batch_size] int64, pinned: turn t since the ring was created is in entry t % R. ``counts`` [1 + 2 exits]
    int64: the device's counters when `fetch` copied them: turns written, incremented by the kernel `loop_turn` after each entry;
    turns that ran the layers after each exit, by `exit_gate`; turns that ran each exit's head, by `exit_candidates`.
    """

    def __init__(self, device: Device, turns: int, batch_size: int, exits: int = 0) -> None:
        self.turns = turns
        self.batch_size = batch_size
        self._device = device
        self.entries = device.pinned(8 * turns * batch_size).view(np.int64).reshape(turns, batch_size)
        self.counts = device.pinned(8 * (1 + 2 * exits)).view(np.int64)
        self._counters = Arena(device, {"counts": self.counts.nbytes})
        self.counts[:] = 0
        self._last_counts = self.counts.copy()

    @property
    def pointers(self) -> tuple[int, int]:
        """Addresses of ``entries`` and the device's counters; pinned memory has the same address on host and device."""
        return self.entries.ctypes.data, self._counters.pointer

    def fetch(self) -> None:
        """Queue the copy of the counters to the host, which `take` reads after the next synchronization."""
        self._device.download(self.counts, self._counters.pointer)

    def take(self) -> list[list[int]]:
        """The turns written since the last call: one value per sequence, see `exit_and_token`, or `NO_TOKEN`.

        Raises TideError when more turns were written than the ring holds.
        """
        before, written = int(self._last_counts[0]), int(self.counts[0])
        if written - before > self.turns:
            raise TideError(f"{written - before} turns were written to a ring of {self.turns}; read it after every launch")
        found = [self.entries[turn % self.turns].tolist() for turn in range(before, written)]
        self._last_counts[0] = written
        return found

    def take_counts(self) -> tuple[list[int], list[int]]:
        """Number of turns since the last call that ran the layers after each exit, and each exit's head."""
        found = (self.counts[1:] - self._last_counts[1:]).tolist()
        self._last_counts[1:] = self.counts[1:]
        exits = len(found) // 2
        return found[:exits], found[exits:]
