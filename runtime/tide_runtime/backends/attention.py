"""The two forms of attention on the CPU: the additive mask of plain attention, and the choice between the forms.

Which of a segment's forms runs a step of several rows faster: GroupQueryAttention or plain products.

GroupQueryAttention is one node whose cost follows each row's valid length; it takes one token a row. The plain form is a dozen
nodes whose cost follows all slots of the cache, but query heads that share a KV head come almost for free. Rows of different
lengths may take GroupQueryAttention by another of its kernels (tide_export.passes.attention_ragged).
benchmarks/attention_forms.py measures all of them; docs/measured.md shows its table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tide_runtime.bundle.manifest import Manifest

ATTENTION_BIAS = "attention_bias"


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
        return cls(rows, seq, slots, int(name.removeprefix(ATTENTION_BIAS).removeprefix("_") or 0))

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


_SHARING = 8  # query heads a KV head from which on products are faster; with 4 they take as long, with 1 up to 1.5 times


def products_pay(manifest: Manifest) -> bool:
    """Whether products of one token a row are faster than GroupQueryAttention where caches are mostly filled: where many heads
    share keys, and in fp16, which it has no kernel of its own for."""
    return manifest.dtype != "fp32" or manifest.model.attention_heads >= _SHARING * manifest.kv[0].heads


def prefers_plain(lengths: Sequence[int], seq: int, slots: int, pays: bool) -> bool:
    """For rows of ``lengths`` valid tokens and ``seq`` new ones each, over a cache of ``slots``; ``pays``: see `products_pay`."""
    rows = len(lengths)
    if rows == 1:
        return False
    if seq > 1:
        return True  # GroupQueryAttention refuses this over a filled cache
    return pays and 3 * sum(lengths) > 2 * rows * slots  # reading empty slots would cost more than it saves
