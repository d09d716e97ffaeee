"""The additive mask of attention as matrix products (`batched_graph`).

The target ``cuda`` computes it so for several tokens of several sequences and in fp32, the target ``cpu`` where prompt tokens are
cached in another order than the text's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

ATTENTION_BIAS = "attention_bias"


class AttentionBias:
    """Causal mask ``array`` [B, S, 1, slots] float32: 0 at slots a token attends to, else -inf.

    A token attends to its own slot and those before it; with ``window`` > 0 only to the last ``window`` of them.
    """

    def __init__(self, batch_size: int, seq: int, slots: int, window: int) -> None:
        self.array, self._offsets = np.empty((batch_size, seq, 1, slots), np.float32), np.arange(seq)
        self._is_incremental = seq == 1 and not window  # the next mask differs by one visible slot per sequence
        self._filled_for: list[int] | None = None  # num_cached_tokens of the last fill, if the mask is incremental
        # The mask of position p is that of position 0 shifted by p, so all masks are windows into one strip.
        strip = np.full(2 * slots - 1, -np.inf, np.float32)
        strip[max(0, slots - window) if window else 0 : slots] = 0
        self._mask_of_position = sliding_window_view(strip, slots)[::-1]

    @classmethod
    def named(cls, name: str, batch_size: int, seq: int, slots: int) -> AttentionBias:
        """The mask of a graph input ``attention_bias`` or ``attention_bias_W`` (window of W tokens)."""
        return cls(batch_size, seq, slots, int(name.removeprefix(ATTENTION_BIAS).removeprefix("_") or 0))

    def fill(self, num_cached_tokens: Sequence[int]) -> None:
        """Fill the mask of S new tokens per sequence, which follow the cached ones."""
        last = self._filled_for
        if last is not None and all(new == old + 1 for new, old in zip(num_cached_tokens, last, strict=True)):
            for index, slot in enumerate(num_cached_tokens):  # decoding: one more slot becomes visible
                self.array[index, 0, 0, slot] = 0
        else:
            self.array[:, :, 0] = self._mask_of_position[np.array(num_cached_tokens)[:, None] + self._offsets]
        self._filled_for = list(num_cached_tokens) if self._is_incremental else None

    def fill_scattered(self, before: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Fill the mask of one sequence's tokens at ``positions``, after cached tokens at positions ``before`` in any order."""
        held, self._filled_for = np.append(before, positions), None
        self.array[0, :, 0] = -np.inf
        self.array[0, :, 0, : len(held)] = np.where(held <= positions[:, None], 0, -np.inf)  # a single row's copy has its mask
