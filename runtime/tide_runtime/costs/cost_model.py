"""What launching graphs costs, for policies that weigh drafting against plain decoding.

Figures come from the bundle's calibration, so that decisions, and with them sampled tokens, are the same on every machine
and every run. Without a calibration layers count as 1 each, a batch of 4 tokens as 1.24 tokens (DESIGN, "Measured facts").
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from tide_runtime.backends.step_arrays import rounded_tokens
from tide_runtime.bundle.calibration import PADDING, CostTable, StepCost
from tide_runtime.bundle.exits import Exit, bundle_exits
from tide_runtime.bundle.manifest import UNCUT, Manifest, kv_fill_graph

_GUESS = [StepCost(1, seq, launch_ms=0.1, layer_ms=0.92 + 0.08 * seq, head_ms=1.4, exit_ms=0.2, host_ms=0.1) for seq in (1, 64)]


class CostModel:
    """Milliseconds (or, without a calibration, layers) of parts of a step of some ``tokens`` in all, of ``rows`` rows."""

    def __init__(self, manifest: Manifest) -> None:
        table: CostTable | None = manifest.calibration.costs if manifest.calibration is not None else None
        self._steps = table.steps if table is not None and table.steps else _GUESS
        self._warm_shares = {int(layers): shares for layers, shares in table.warm_shares.items()} if table is not None else {}
        self._padding, self.draw_ms = (table.padding, table.draw_ms) if table is not None else (PADDING, 0.0)
        self._edges = [0, *manifest.checkpoints, manifest.model.num_layers]
        self.depth = len(manifest.segments)
        self._whole_launches = 1 if any(UNCUT in target.graphs for target in manifest.targets.values()) else self.depth
        self.fills = {kv_fill_graph(exit.info): exit for exit in bundle_exits(manifest)}
        self._fill_share = _fill_share(manifest)
        self.step = cache(self._step)
        self.full = cache(self._full)
        self.plain = cache(self._plain)
        self.asking = cache(self._asking)  # by far the most wanted: of every token that an exit is asked about

    def _step(self, rows: int, tokens: int, longest: int | None = None) -> StepCost:
        """Of so many rows, the longest of so many tokens; None: all of the same length.

        Of rows of different lengths products take the tokens there are, rounded up as backends do it; attention and what moves
        data take padding too.
        """
        if longest is None or tokens == rows * longest:
            return self._on_average(rows, tokens, even=True)
        packed = self._on_average(rows, rounded_tokens(tokens, rows * longest), even=False)
        added = max(0.0, self._on_average(rows, rows * longest, even=True).layer_ms - packed.layer_ms)
        return replace(packed, layer_ms=packed.layer_ms + self._padding * added)

    def _on_average(self, rows: int, tokens: int, even: bool) -> StepCost:
        """Costs at the nearest measured number of rows: linear in the tokens between the measured numbers of them, and beyond.

        Rows of one token each run in another form than all other steps: where a step between one token a row and two was
        measured, uneven rows are priced by it and not by the one of one token, even rows the other way round.
        """
        nearest = min({s.rows for s in self._steps}, key=lambda measured: abs(measured - rows))
        measured, seq = sorted((s for s in self._steps if s.rows == nearest), key=lambda s: s.seq), tokens / nearest
        between = [s for s in measured if 1 < s.seq < 2]
        known = [s for s in measured if s not in between] if even or not between else [s for s in measured if s.seq > 1]
        above = next((i for i, s in enumerate(known) if s.seq >= seq), len(known) - 1)
        low, high = known[max(0, above - 1)], known[max(above, min(1, len(known) - 1))]
        share = max(0.0, (seq - low.seq) / (high.seq - low.seq)) if high.seq != low.seq else 0.0
        return replace(low.towards(high, share), rows=rows)

    def segments(self, rows: int, tokens: int, first: int, end: int, longest: int | None = None) -> float:
        """Segments ``first`` … ``end - 1``; ``longest``: tokens of the longest row, None: all have as many."""
        cost = self.step(rows, tokens, longest)
        return (end - first) * cost.launch_ms + (self._edges[end] - self._edges[first]) * cost.layer_ms

    def fill(self, tokens: int, exit: Exit) -> float:
        """Projecting keys and values of the layers that ``tokens`` of one row skipped: by their share of the layers' weights."""
        layers = self._edges[-1] - exit.info.tail_layers - exit.info.checkpoint
        cost = self.step(1, tokens)
        return cost.launch_ms + self._fill_share * layers * cost.layer_ms if tokens else 0.0

    def ask(self, rows: int, exit: Exit, with_head: bool = True) -> float:
        """Asking an exit about one token of each row; ``with_head``: not only its MLP."""
        single = self.step(rows, rows)
        graph = single.exit_ms if exit.graph is not None else 0.0
        if not with_head:
            return graph
        if not exit.info.tail_layers:
            return graph + single.head_ms
        last = len(self._edges) - 2
        return graph + self.segments(rows, rows, last, last + 1) + single.logits_ms

    def _asking(self, rows: int, first: int, exit: Exit, with_head: bool = True, again: bool = True) -> float:
        """Running a token of each row from boundary ``first`` to ``exit`` and asking it, the loop included; ``again``: the token
        before stopped early too, so that the first layers' weights are still in the caches."""
        step, shallow = self.step(rows, rows), self.segments(rows, rows, first, exit.boundary)
        warm = self._warm_share(exit) if first == 0 and again else 1.0
        return warm * shallow + self.ask(rows, exit, with_head) + step.host_ms + step.ask_extra_ms

    def _warm_share(self, exit: Exit) -> float:
        """What the layers before the first exit take of their cost when tokens stop there again and again."""
        if not self._warm_shares:
            return 1.0
        means = {depth: float(np.mean(shares)) for depth, shares in sorted(self._warm_shares.items())} | {self._edges[-1]: 1.0}
        return float(np.interp(exit.info.checkpoint + exit.info.tail_layers, list(means), list(means.values())))

    def _plain(self, rows: int) -> float:
        """A step of `full`, linear in the rows between the measured numbers of them. `full` takes the nearest one, which does for
        steps of the same rows, but not for what a row more adds."""
        measured = sorted({step.rows for step in self._steps})
        if not measured[0] < rows < measured[-1]:
            return self.full(rows, rows, 1)
        return float(np.interp(rows, measured, [self.full(count, count, 1) for count in measured]))

    def _full(self, rows: int, tokens: int, longest: int) -> float:
        """All layers, the head on every token, and the loop around them, which is longer where drafts are verified; ``longest``:
        tokens of the longest row."""
        cost, saved = self.step(rows, tokens, longest), self.depth - self._whole_launches
        graphs = self.segments(rows, tokens, 0, self.depth, longest) - saved * cost.launch_ms
        return graphs + cost.logits_ms + cost.host_ms + (cost.deep_extra_ms if tokens > rows else 0.0)


def _fill_share(manifest: Manifest) -> float:
    """What part of a layer's weights makes its keys and values."""
    exits = manifest.calibration.exits if manifest.calibration is not None else []
    parameters = {graph.name: graph.parameters for graph in manifest.graphs}
    for info in exits:
        layers = manifest.model.num_layers - info.tail_layers - info.checkpoint
        whole = sum(segment.parameters for segment in manifest.segments) / manifest.model.num_layers
        if whole and kv_fill_graph(info) in parameters:
            return parameters[kv_fill_graph(info)] / layers / whole
    return 0.0
