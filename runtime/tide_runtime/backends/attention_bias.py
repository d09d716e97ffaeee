"""The additive mask of plain attention: which cache slots each token of a step may look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

NAME = "attention_bias"


class AttentionBias:
    """``array`` [B, S, 1, T] float32: 0 at slots up to a token's own (the last ``window`` of them, unless 0), else -inf."""

    def __init__(self, rows: int, seq: int, slots: int, window: int) -> None:
        self.array, self._steps = np.empty((rows, seq, 1, slots), np.float32), np.arange(seq)
        self._widens = seq == 1 and not window  # rows see all they saw before
        self._shown: list[int] | None = None  # lengths that ``array`` is filled for, where the next ones may only add to it
        # The row of position p is the row of position 0 shifted by p, so all of them are windows into one strip.
        strip = np.full(2 * slots - 1, -np.inf, np.float32)
        strip[max(0, slots - window) if window else 0 : slots] = 0
        self._of_position = sliding_window_view(strip, slots)[::-1]

    @classmethod
    def named(cls, name: str, rows: int, seq: int, slots: int) -> AttentionBias:
        """For a graph's input ``attention_bias`` or ``attention_bias_W`` (window of W tokens)."""
        return cls(rows, seq, slots, int(name.removeprefix(NAME).removeprefix("_") or 0))

    def fill(self, lengths: Sequence[int]) -> None:
        """For tokens at the slots ``lengths[b]`` … ``lengths[b] + S - 1`` of each row."""
        if self._shown is not None and all(new == old + 1 for new, old in zip(lengths, self._shown, strict=True)):
            for row, length in enumerate(lengths):  # decoding: each row sees one slot more
                self.array[row, 0, 0, length] = 0
        else:
            self.array[:, :, 0] = self._of_position[np.array(lengths)[:, None] + self._steps]
        self._shown = list(lengths) if self._widens else None

    def fill_scattered(self, before: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """For one row's tokens at ``positions`` of the text, behind a cache that holds those at ``before`` in any order."""
        held, self._shown = np.append(before, positions), None
        self.array[0, :, 0] = -np.inf
        self.array[0, :, 0, : len(held)][held <= positions[:, None]] = 0
