"""What a backend is: it loads a target's graphs and runs them on the rows of a KV cache.

A ``Backend`` holds the weights and is shared by all callers. An ``ExecutionContext`` holds the KV caches of some sequences and
belongs to one caller. A ``Step`` is one launch: some tokens of each of several sequences. Fill its arrays, run graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Step(Protocol):
    """Buffers and bindings for T tokens of consecutive slots: those of each row stand behind those of the row before.

    Arrays are host views; the next step may have the same memory. They may be longer than T or N, with garbage behind.
    """

    input_ids: NDArray[np.int64]  # [T]
    hidden: list[NDArray[np.generic]]  # what each segment but the last gives [T, H]; the last is the input of ``head``
    logits: NDArray[np.float32]  # [N, V], as the model computes them: of the tokens that want some, or of all T after ``head``
    token: NDArray[np.int64]  # [N], argmax of the logits
    score: NDArray[np.float32]  # [T], an exit's MLP router: how sure it is, 0 … 1

    def place(self, lengths: Sequence[int]) -> None:
        """Say where the tokens go: of each row b into the cache slots and positions from ``lengths[b]`` on.

        A backend may write as many slots in every row as the longest row has tokens, garbage behind a row's own ones, also
        in rows without any. Raises CacheFullError when the last of them is beyond the bundle's max_seq_len.
        """

    def place_scattered(self, slot: int, positions: NDArray[np.int64], before: NDArray[np.int64] | None = None) -> None:
        """For a step of one row whose tokens stand at any ``positions`` [T] of the text, rising: they go to the slots from
        ``slot`` on.

        Args:
            before: positions of the tokens in the slots up to there, in any order; the step's tokens attend to those that
                stand before them in the text. None where no segment is run, only ``kv_fill_c``.

        Raises ParamsError where an attention of the model goes by slots, as those with sliding windows do.
        """

    def run(self, graph: str) -> None:
        """Run one graph of the bundle on the buffers: ``segment_i``, ``exit_c`` or ``head``."""


class ExecutionContext(Protocol):
    """KV caches of ``capacity`` rows.

    What lies behind a row's valid entries counts for nothing, but must be finite: a backend may multiply it by 0. So caches
    that a failed request has filled with NaN are not to be used again.
    """

    capacity: int
    layers_launched: int  # decoder layers launched on these slots so far
    every_layer: Sequence[str]  # graphs that take tokens through all layers: every segment, or one where they are not cut

    def step(self, first_row: int, counts: Sequence[int], wanted: Sequence[int] = ()) -> Step:
        """A step of ``counts[b]`` tokens for each slot from ``first_row`` on, 0 for one that only stands between others.

        Args:
            wanted: of how many of its last tokens each row wants logits from the last segment; of none when left out.
        """

    def clear(self) -> None:
        """Forget all rows: what comes next are rows of another caller."""

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` cache entries of slot ``source`` to slot ``target``, in every layer."""

    def close(self) -> None:
        """Nobody uses them again: their memory is free once the caller has forgotten them."""


class Backend(Protocol):
    """A loaded target."""

    name: str
    launches: dict[str, int]  # graph name → times it was launched, counted here and nowhere else

    def context(self, capacity: int) -> ExecutionContext:
        """New KV caches for ``capacity`` rows."""
