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
_PARTS = ("launch_ms", "layer_ms", "head_ms", "exit_ms", "host_ms")


class StepCosts:
    """Milliseconds (or, without a calibration, layers) of parts of a step of some ``tokens`` in all, of ``rows`` rows."""

    def __init__(self, manifest: Manifest) -> None:
        table: CostTable | None = manifest.calibration.costs if manifest.calibration is not None else None
        self._steps = table.steps if table is not None and table.steps else _GUESS
        self._edges = [0, *manifest.checkpoints, manifest.model.num_layers]
        self.step = cache(self._step)
        self.full = cache(self._full)

    def _step(self, rows: int, tokens: int) -> StepCost:
        """Costs at the nearest measured number of rows: linear in the tokens between the measured numbers of them, and beyond."""
        nearest = min({s.rows for s in self._steps}, key=lambda measured: abs(measured - rows))
        known = sorted((s for s in self._steps if s.rows == nearest), key=lambda s: s.seq)
        seq = tokens / nearest
        above = next((i for i, s in enumerate(known) if s.seq >= seq), len(known) - 1)
        low, high = known[max(0, above - 1)], known[max(above, min(1, len(known) - 1))]
        share = max(0.0, (seq - low.seq) / (high.seq - low.seq)) if high.seq != low.seq else 0.0
        values = {name: getattr(low, name) + share * (getattr(high, name) - getattr(low, name)) for name in _PARTS}
        return StepCost(rows, tokens, **values)

    def segments(self, rows: int, tokens: int, first: int, end: int) -> float:
        """Segments ``first`` … ``end - 1``."""
        cost = self.step(rows, tokens)
        return (end - first) * cost.launch_ms + (self._edges[end] - self._edges[first]) * cost.layer_ms

    def ask(self, rows: int, exit: Exit, with_head: bool = True) -> float:
        """Asking an exit about one token of each row; ``with_head``: not only its MLP."""
        single = self.step(rows, rows)
        graph = single.exit_ms if exit.graph is not None else 0.0
        if not with_head:
            return graph
        last = len(self._edges) - 2
        return graph + single.head_ms + (self.segments(rows, rows, last, last + 1) if exit.info.tail_layers else 0.0)

    def asking(self, rows: int, exits: Sequence[Exit], asks: Sequence[int]) -> float:
        """Running single tokens to ``exits``, rising, and asking each of them ``asks`` times, the loop included."""
        first, total = 0, 0.0
        for exit, count in zip(exits, asks, strict=True):
            host = self.step(rows, rows).host_ms
            total += count * (self.segments(rows, rows, first, exit.boundary) + self.ask(rows, exit) + host)
            first = exit.boundary
        return total

    def _full(self, rows: int, tokens: int) -> float:
        """All segments, the head on every token, and the loop around them."""
        cost = self.step(rows, tokens)
        return self.segments(rows, tokens, 0, len(self._edges) - 1) + cost.logits_ms + cost.host_ms
