"""The tokens of a loop's turns, in pinned memory that the device writes and the host reads: nothing is copied for a token."""

from __future__ import annotations

import numpy as np

from tide_runtime.cuda.device import Device
from tide_runtime.errors import TideError

NO_TOKEN = -1
EXITED = 1 << 32  # added to a token that left early


class TokenRing:
    """``entries`` [R, rows] int64: turn t of all turns since the ring was made is in entry t % R.

    ``counts`` [2] int64: turns written, by the kernel `loop_turn` after each entry, and turns whose deeper layers ran.
    """

    def __init__(self, device: Device, turns: int, rows: int) -> None:
        self.turns, self.rows = turns, rows
        self._memory = device.pinned(8 * (turns * rows + 2)).view(np.int64)
        self._memory[:] = 0
        self.counts, self.entries = self._memory[:2], self._memory[2:].reshape(turns, rows)
        self._read = self._read_deep = 0

    @property
    def pointers(self) -> tuple[int, int]:
        """Of ``entries`` and of ``counts``: pinned memory has one address on both sides."""
        return self.entries.ctypes.data, self.counts.ctypes.data

    def take(self) -> list[list[int]]:
        """The turns that were written since the last call, each with a value a row: a token (+ `EXITED`), or `NO_TOKEN`.

        Raises TideError when more were written than the ring holds.
        """
        written = int(self.counts[0])
        if written - self._read > self.turns:
            raise TideError(f"{written - self._read} turns were written to a ring of {self.turns}; read it after every launch")
        found = [self.entries[turn % self.turns].tolist() for turn in range(self._read, written)]
        self._read = written
        return found

    def take_deep(self) -> int:
        """How many turns since the last call ran the layers behind the exit."""
        before, self._read_deep = self._read_deep, int(self.counts[1])
        return self._read_deep - before
