"""What launching graphs costs, for policies that weigh drafting against plain decoding.

Figures come from the bundle's calibration, so that decisions, and with them sampled tokens, are the same on every machine
and every run. Without a calibration layers count as 1 each, a batch of 4 tokens as 1.24 tokens (DESIGN, "Measured facts").
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tide_runtime.calibration import CostTable, StepCost
from tide_runtime.exits import Exit
from tide_runtime.manifest import Manifest

_GUESS = [StepCost(1, seq, launch_ms=0.1, layer_ms=0.92 + 0.08 * seq, head_ms=1.4, exit_ms=0.2, host_ms=0.1) for seq in (1, 64)]


class StepCosts:
    """Milliseconds (or, without a calibration, layers) of parts of a step for ``rows`` rows of ``seq`` tokens."""

    def __init__(self, manifest: Manifest) -> None:
        table: CostTable | None = manifest.calibration.costs if manifest.calibration is not None else None
        self._steps = table.steps if table is not None and table.steps else _GUESS
        self._edges = [0, *manifest.checkpoints, manifest.model.num_layers]
        self.step = cache(self._step)

    def _step(self, rows: int, seq: int) -> StepCost:
        """Costs between the measured points: linear in ``seq``, at the nearest measured number of rows."""
        nearest = min({s.rows for s in self._steps}, key=lambda measured: abs(measured - rows))
        known = sorted((s for s in self._steps if s.rows == nearest), key=lambda s: s.seq)
        above = next((s for s in known if s.seq >= seq), known[-1])
        below = next((s for s in reversed(known) if s.seq <= seq), known[0])
        share = (seq - below.seq) / (above.seq - below.seq) if above.seq != below.seq else 0.0
        names = ("launch_ms", "layer_ms", "head_ms", "exit_ms", "host_ms")
        values = {n: getattr(below, n) + share * (getattr(above, n) - getattr(below, n)) for n in names}
        return StepCost(rows, seq, **values)

    def segments(self, rows: int, seq: int, first: int, end: int) -> float:
        """Segments ``first`` … ``end - 1``."""
        cost = self.step(rows, seq)
        return (end - first) * cost.launch_ms + (self._edges[end] - self._edges[first]) * cost.layer_ms

    def asking(self, rows: int, exits: Sequence[Exit], asks: Sequence[int]) -> float:
        """Running single tokens to ``exits``, rising, and asking each of them ``asks`` times."""
        single, first, total, depth = self.step(rows, 1), 0, 0.0, len(self._edges) - 1
        for exit, count in zip(exits, asks, strict=True):
            graphs = single.head_ms + single.host_ms + (single.exit_ms if exit.graph is not None else 0.0)
            tail = self.segments(rows, 1, depth - 1, depth) if exit.info.tail_layers else 0.0
            total += count * (self.segments(rows, 1, first, exit.boundary) + tail + graphs)
            first = exit.boundary
        return total

    def full(self, rows: int, seq: int) -> float:
        """All segments, the head on every token, and the loop around them."""
        cost = self.step(rows, seq)
        return self.segments(rows, seq, 0, len(self._edges) - 1) + cost.head_ms + cost.host_ms
