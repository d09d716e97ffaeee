"""The tokens of a loop's turns, in pinned memory that the device writes and the host reads: nothing is copied for a token."""

from __future__ import annotations

import numpy as np

from tide_runtime.backends.device.device import Device
from tide_runtime.errors import TideError

NO_TOKEN = -1
EXIT_UNIT = 1 << 32  # a token that left early has the exit's number, from 1 on, in these bits


def exit_and_token(value: int) -> tuple[int, int]:
    """The exit that the token of a ring's entry left at (0: none), and the token."""
    return divmod(value, EXIT_UNIT)


class TokenRing:
    """``entries`` [R, batch_size] int64: turn t of all turns since the ring was made is in entry t % R.

    ``counts`` [1 + exits] int64: turns written, by the kernel `loop_turn` after each entry, and turns that ran the layers behind
    each exit, by `exit_gate`.
    """

    def __init__(self, device: Device, turns: int, batch_size: int, exits: int = 0) -> None:
        self.turns, self.batch_size = turns, batch_size
        self._memory = device.pinned(8 * (turns * batch_size + 1 + exits)).view(np.int64)
        self._memory[:] = 0
        self.counts, self.entries = self._memory[: 1 + exits], self._memory[1 + exits :].reshape(turns, batch_size)
        self._read = self.counts.copy()

    @property
    def pointers(self) -> tuple[int, int]:
        """Of ``entries`` and of ``counts``: pinned memory has one address on both sides."""
        return self.entries.ctypes.data, self.counts.ctypes.data

    def take(self) -> list[list[int]]:
        """The turns that were written since the last call, each with a value a row: see `exit_and_token`, or `NO_TOKEN`.

        Raises TideError when more were written than the ring holds.
        """
        before, written = int(self._read[0]), int(self.counts[0])
        if written - before > self.turns:
            raise TideError(f"{written - before} turns were written to a ring of {self.turns}; read it after every launch")
        found = [self.entries[turn % self.turns].tolist() for turn in range(before, written)]
        self._read[0] = written
        return found

    def take_deep(self) -> list[int]:
        """How many turns since the last call ran the layers behind each exit."""
        deep = (self.counts[1:] - self._read[1:]).tolist()
        self._read[1:] = self.counts[1:]
        return deep
