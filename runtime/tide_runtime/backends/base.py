"""What a backend is: it loads a target's graphs and runs them on the rows of a KV cache.

A ``Backend`` holds the weights and is shared by all callers. A ``Slots`` holds the KV caches of some rows and belongs to
one caller. A ``Step`` is a fixed shape: a run of rows and S tokens for each, with its buffers; fill its arrays, run graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Step(Protocol):
    """Buffers and bindings for ``rows`` consecutive slots and ``seq`` tokens each. Arrays are host views, reused per call."""

    input_ids: NDArray[np.int64]  # [B, S]
    hidden: list[NDArray[np.generic]]  # what each segment gives [B, S, H]; the last is the head's input
    logits: NDArray[np.float32]  # [B, S, V], as the model computes them
    token: NDArray[np.int64]  # [B, S], argmax of the logits
    score: NDArray[np.float32]  # [B, S], an exit's MLP router: how sure it is, 0 … 1

    def place(self, lengths: Sequence[int]) -> None:
        """Say where each row's S tokens go: cache slots and positions ``lengths[b]`` … ``lengths[b] + S - 1``.

        Raises CacheFullError when the last of them is beyond the bundle's max_seq_len, whether it carries a token or garbage.
        """

    def run(self, graph: str) -> None:
        """Run one graph of the bundle on the buffers: ``segment_i``, ``exit_c`` or ``head``."""


class Slots(Protocol):
    """KV caches of ``capacity`` rows.

    What lies behind a row's valid entries counts for nothing, but must be finite: a backend may multiply it by 0. So caches
    that a failed request has filled with NaN are not to be used again.
    """

    capacity: int
    layers_launched: int  # decoder layers launched on these slots so far

    def step(self, first_row: int, rows: int, seq: int) -> Step:
        """The step for slots [first_row, first_row + rows) and ``seq`` tokens; bindings are kept and reused."""

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` cache entries of slot ``source`` to slot ``target``, in every layer."""


class Backend(Protocol):
    """A loaded target."""

    name: str
    launches: dict[str, int]  # graph name → times it was launched, counted here and nowhere else

    def slots(self, capacity: int) -> Slots:
        """New KV caches for ``capacity`` rows."""
