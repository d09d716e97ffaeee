"""The cost model: what launching graphs takes, for the policies and for the calibration's simulator alike.

Figures of exits come from the bundle's calibration, not from the machine that runs, so that what policy ``exit`` decides, and
with it its text, is the same on every machine. Where a decision does not change the text, passes through all layers are priced
as measured here (`Backend.pass_costs`), and the calibration's figures are scaled to them. With neither, a layer counts as 1 and a
batch of 4 tokens as 1.24 tokens, with low-bit weights as 2.2: ONNX Runtime's low-bit products gain little from further tokens
(MatMulNBits of 4 and 8 bits took 2.1 to 4.9 times as long for 8 tokens as for one, on two cores with AVX512-VNNI).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.step_arrays import rounded_tokens
from tide_runtime.bundle.calibration import PADDING, CostTable, ExitInfo, StepCost
from tide_runtime.bundle.exits import Exit, bundle_exits
from tide_runtime.bundle.manifest import UNCUT, Manifest, kv_fill_graph
from tide_runtime.errors import CalibrationError

_EXTRA_TOKEN, _LOW_BIT_EXTRA_TOKEN = 0.08, 0.4  # time of each further token of a step, over that of the first
_PARTS = tuple(part.name for part in fields(StepCost) if part.name not in ("rows", "seq"))

Array = NDArray[np.float64]


class StepTable:
    """Measured step costs, read at any size: linear between measured sizes, and beyond them along the last two, never falling.

    Args:
        steps: measured costs.
        padding: what a token that pads a shorter sequence takes of a real one's time, 0 … 1.
        warm_shares: see `CostTable`.
    """

    def __init__(self, steps: Sequence[StepCost], padding: float = PADDING, warm_shares: dict[str, list[float]] | None = None):
        self._steps, self._padding = steps, padding
        self._warm_shares = {int(layers): shares for layers, shares in (warm_shares or {}).items()}
        self.step = cache(self._step)

    @staticmethod
    def of(table: CostTable | None, low_bits: bool = False) -> StepTable:
        """The table of a calibration; a guess where it has none. ``low_bits``: of the weights."""
        if table is None or not table.steps:
            extra = _LOW_BIT_EXTRA_TOKEN if low_bits else _EXTRA_TOKEN
            return StepTable([StepCost(1, s, 0.1, 1 + extra * (s - 1), head_ms=1.4, exit_ms=0.2, host_ms=0.1) for s in (1, 64)])
        return StepTable(table.steps, table.padding, table.warm_shares)

    @property
    def batch_sizes(self) -> list[int]:
        """The measured ones, rising."""
        return sorted({step.rows for step in self._steps})

    def _step(self, batch_size: int, tokens: int, longest: int | None = None) -> StepCost:
        """A step of ``tokens`` tokens in all. ``longest``: tokens of the longest sequence; None: all have as many.

        GEMMs run on packed tokens, rounded up as backends do it; attention and copies also process padding.
        """
        if longest is None or tokens == batch_size * longest:
            return self._at(batch_size, tokens, even=True)
        packed = self._at(batch_size, rounded_tokens(tokens, batch_size * longest), even=False)
        added = max(0.0, self._at(batch_size, batch_size * longest, even=True).layer_ms - packed.layer_ms)
        return replace(packed, layer_ms=packed.layer_ms + self._padding * added)

    def _at(self, batch_size: int, tokens: int, even: bool) -> StepCost:
        """The cost at the nearest measured batch size.

        Steps of one token a sequence run another form of the graphs than all others. Where a step between one and two tokens a
        sequence was measured, uneven steps are priced by it and not by the one of one token, even steps the other way round.
        """
        nearest = min(self.batch_sizes, key=lambda measured: abs(measured - batch_size))
        measured = sorted((step for step in self._steps if step.rows == nearest), key=lambda step: step.seq)
        between = [step for step in measured if 1 < step.seq < 2]
        known = [s for s in measured if s not in between] if even or not between else [s for s in measured if s.seq > 1]
        seq = tokens / nearest
        parts = _interpolate(known, np.array([seq]))
        return StepCost(batch_size, seq, **{name: float(values[0]) for name, values in parts.items()})

    def curve(self, most: int) -> StepCurve:
        """The costs of one sequence at 0 … ``most`` tokens.

        Raises CalibrationError unless one sequence was measured at one token and at a larger size.
        """
        steps = sorted((step for step in self._steps if step.rows == 1), key=lambda step: step.seq)
        if len(steps) < 2 or steps[0].seq != 1:
            raise CalibrationError(
                f"the cost table has one sequence measured at {[step.seq for step in steps]} tokens; "
                "it needs 1 and at least one larger size: measure again with seqs={1: (1, 2, 4, 8, 16)}"
            )
        return StepCurve(self, **_interpolate(steps, np.arange(most + 1, dtype=float)))

    def warm_shares(self, depth: int, num_layers: int) -> Array:
        """Time of a prefix of ``depth`` layers and the head, over that among passes through all layers, when 0, 1, 2, … tokens
        stopped early since such a pass: the processor's caches keep a short prefix. Linear between measured depths."""
        if not self._warm_shares:
            return np.ones(1)
        depths = sorted(self._warm_shares)
        table = np.array([*(self._warm_shares[d] for d in depths), [1.0] * len(self._warm_shares[depths[0]])])
        return np.array([np.interp(depth, [*depths, num_layers], shares) for shares in table.T])


@dataclass(frozen=True)
class StepCurve:
    """`StepCost` of one sequence by number of tokens, each [most + 1]."""

    table: StepTable
    launch_ms: Array
    layer_ms: Array
    head_ms: Array
    exit_ms: Array
    host_ms: Array
    ask_extra_ms: Array
    deep_extra_ms: Array
    lookup_extra_ms: Array

    @classmethod
    def of(cls, costs: CostTable, most: int) -> StepCurve:
        """The curve of a measured table. Raises CalibrationError when it lacks the sizes."""
        return StepTable(costs.steps, costs.padding, costs.warm_shares).curve(most)

    @property
    def logits_ms(self) -> Array:
        return np.maximum(0.0, self.head_ms - self.launch_ms)

    @property
    def evaluation_host_ms(self) -> float:
        """The loop around the evaluation of an exit for one token."""
        return float(self.host_ms[1] + self.ask_extra_ms[1])

    @property
    def verification_host_ms(self) -> float:
        """The loop around a run of what waits."""
        return float(self.host_ms[1] + self.deep_extra_ms[1])

    @property
    def lookup_host_ms(self) -> float:
        """The loop around a pass through all layers, with a lookup of drafts in the text."""
        return float(self.host_ms[1] + self.lookup_extra_ms[1])

    def segments(self, launches: int, layers: int) -> Array:
        """[most + 1] ms of ``launches`` segments with ``layers`` layers in all; no tokens take none."""
        times = launches * self.launch_ms + layers * self.layer_ms
        times[0] = 0.0
        return times

    def whole(self, layers: int) -> Array:
        """[most + 1] ms of a pass through all ``layers`` layers: one launch, the head on every token, the host left out."""
        return self.segments(1, layers) + self.logits_ms

    @property
    def extra_token(self) -> float:
        """ms that one layer takes longer for each token more, a line through the sizes up to 8."""
        sizes = np.arange(1, min(8, len(self.layer_ms) - 1) + 1)
        return max(0.0, float(np.polyfit(sizes, self.layer_ms[sizes], 1)[0])) if len(sizes) > 1 else 0.0


def _interpolate(steps: Sequence[StepCost], seqs: Array) -> dict[str, Array]:
    """Part of a step cost → its values at ``seqs``, from ``steps`` with rising ``seq``.

    A line between the measured sizes. Beyond the last one the line through the last two goes on, unless it falls: more tokens
    never take less time.
    """
    sizes = np.array([step.seq for step in steps], float)
    beyond = np.maximum(0.0, seqs - sizes[-1])
    parts = {}
    for name in _PARTS:
        values = np.array([getattr(step, name) for step in steps], float)
        slope = max(0.0, (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])) if len(sizes) > 1 else 0.0
        parts[name] = np.interp(seqs, sizes, values) + slope * beyond
    return parts


class CostModel:
    """Milliseconds (without a calibration: layers) of parts of a step of the segments between ``edges``.

    Args:
        table: measured costs; None: a guess.
        edges: 0, the checkpoint layers, and the number of layers, rising: where the model is cut.
        whole_launches: launches of a pass through all layers: 1 where the uncut graph is there.
        fill_share: cost of projecting a layer's keys and values over that of the layer.
        low_bits: whether the weights are low-bit, for the guess.
        passes: whole passes as measured on this machine; None: they follow from ``table``.
    """

    def __init__(
        self,
        table: CostTable | None,
        edges: Sequence[int],
        whole_launches: int = 1,
        fill_share: float = 0.0,
        low_bits: bool = False,
        passes: CostTable | None = None,
    ) -> None:
        self._whole_launches, self._fill_share, self.edges = whole_launches, fill_share, edges
        self._passes: StepTable | None = None
        if passes is not None:
            if table is not None:
                table = _scaled(table, passes.unsplit_ms / table.unsplit_ms)
            self._passes = StepTable.of(passes)
        self.table = StepTable.of(table, low_bits)
        self.draw_ms = table.draw_ms if table is not None else 0.0
        self.fills: dict[str, Exit] = {}  # graph that projects keys and values → the exit behind which it does
        self.num_segments = len(edges) - 1
        self.step: Callable[..., StepCost] = self.table.step
        self.full = cache(self._full)
        self.evaluation = cache(self._evaluation)  # needed for every token that an exit is evaluated for

    @classmethod
    def of(cls, manifest: Manifest, passes: CostTable | None = None) -> CostModel:
        """The model of a bundle; ``passes``: see `CostModel`."""
        table = manifest.calibration.costs if manifest.calibration is not None else None
        edges = [0, *manifest.checkpoints, manifest.model.num_layers]
        uncut = any(UNCUT in target.graphs for target in manifest.targets.values())
        model = cls(table, edges, 1 if uncut else len(edges) - 1, _fill_share(manifest), bool(manifest.weights), passes)
        model.fills = {kv_fill_graph(early_exit.info): early_exit for early_exit in bundle_exits(manifest)}
        return model

    @property
    def has_measured_passes(self) -> bool:
        """Whether passes through all layers are priced as measured on this machine."""
        return self._passes is not None

    def segments(self, batch_size: int, tokens: int, first: int, end: int, longest: int | None = None) -> float:
        """Segments ``first`` … ``end - 1``; ``longest``: tokens of the longest sequence, None: all have as many."""
        cost = self.step(batch_size, tokens, longest)
        return (end - first) * cost.launch_ms + (self.edges[end] - self.edges[first]) * cost.layer_ms

    def fill(self, tokens: int, early_exit: Exit) -> float:
        """Projecting keys and values of the layers that ``tokens`` of one sequence skipped, by their share of the weights."""
        layers = self.edges[-1] - early_exit.info.tail_layers - early_exit.info.checkpoint
        cost = self.step(1, tokens)
        return cost.launch_ms + self._fill_share * layers * cost.layer_ms if tokens else 0.0

    def head(self, batch_size: int, early_exit: Exit, with_head: bool = True) -> float:
        """The exit's own graphs for one token of each sequence; ``with_head``: not only its MLP."""
        single = self.step(batch_size, batch_size)
        graph = single.exit_ms if early_exit.graph is not None else 0.0
        if not with_head:
            return graph
        if not early_exit.info.tail_layers:
            return graph + single.head_ms
        last = self.num_segments - 1
        return graph + self.segments(batch_size, batch_size, last, last + 1) + single.logits_ms

    def _evaluation(self, batch_size: int, first: int, early_exit: Exit, with_head: bool = True, again: bool = True) -> float:
        """Running a token of each sequence from boundary ``first`` to ``early_exit`` and evaluating it, the loop included.

        Args:
            again: the token before stopped early too, so that the first layers' weights are still in the caches.
        """
        step, shallow = self.step(batch_size, batch_size), self.segments(batch_size, batch_size, first, early_exit.boundary)
        warm = self._mean_warm_share(early_exit.info) if first == 0 and again else 1.0
        return warm * shallow + self.head(batch_size, early_exit, with_head) + step.host_ms + step.ask_extra_ms

    def _mean_warm_share(self, info: ExitInfo) -> float:
        return float(self.table.warm_shares(info.checkpoint + info.tail_layers, self.edges[-1]).mean())

    def early_exit_token(self, exits: Sequence[Exit], evaluated: Sequence[int], waited: int, run_deep: int) -> float:
        """One token of one sequence under policy ``exit``, in full-depth decode steps.

        Args:
            evaluated: which of ``exits`` were evaluated. The segments before the others are run where the token goes on.
            waited: tokens that wait for the remaining layers, this one included; 0: it stopped at the last evaluated exit.
            run_deep: how many of them are run through these layers; keys and values of the others are projected.
        """
        total, first = 0.0, 0
        for early_exit, was_evaluated in zip(exits, evaluated, strict=True):
            if was_evaluated:
                total += self.evaluation(1, first, early_exit, again=waited != 1)
            elif waited:
                total += self.segments(1, 1, first, early_exit.boundary)
            first = early_exit.boundary
        if waited:
            last = self.step(1, 1)
            rest = self.segments(1, run_deep, first, self.num_segments) + self.fill(waited - run_deep, exits[0])
            total += rest + last.logits_ms + last.host_ms + last.deep_extra_ms
        return total / self.full(1, 1, 1)

    def draft_head(self, batch_size: int, first: bool) -> float:
        """A guess of the draft head in each sequence: the ``first`` one behind a pass, or a further one.

        For models of measured passes only.
        """
        assert self._passes is not None
        step = self._passes.step(1, batch_size)
        return step.exit_ms if first else step.head_ms

    def packed(self, batch_size: int, decoded: int, prompt_tokens: int) -> float:
        """All layers for ``decoded`` tokens of ``batch_size`` sequences, with the head, and for ``prompt_tokens`` without."""
        tokens = decoded + prompt_tokens
        if self._passes is not None:
            return self._passes.step(max(1, batch_size), tokens).layer_ms
        cost = self.step(max(1, batch_size), tokens)
        layers = self._whole_launches * cost.launch_ms + self.edges[-1] * cost.layer_ms
        return layers + cost.logits_ms * decoded / tokens + cost.host_ms

    def _full(self, batch_size: int, tokens: int, longest: int) -> float:
        """All layers, the head on every token, and the loop around them, which takes longer where drafts are verified."""
        if self._passes is not None:
            return self._passes.step(batch_size, tokens, longest).layer_ms
        cost, saved = self.step(batch_size, tokens, longest), self.num_segments - self._whole_launches
        graphs = self.segments(batch_size, tokens, 0, self.num_segments, longest) - saved * cost.launch_ms
        return graphs + cost.logits_ms + cost.host_ms + (cost.deep_extra_ms if tokens > batch_size else 0.0)


def _scaled(table: CostTable, factor: float) -> CostTable:
    """``table`` with all times multiplied by ``factor``."""
    steps = [replace(step, **{part: factor * getattr(step, part) for part in _PARTS}) for step in table.steps]
    return replace(table, steps=steps, draw_ms=factor * table.draw_ms, unsplit_ms=factor * table.unsplit_ms)


def _fill_share(manifest: Manifest) -> float:
    """The share of a layer's weights that makes its keys and values."""
    exits = manifest.calibration.exits if manifest.calibration is not None else []
    parameters = {graph.name: graph.parameters for graph in manifest.graphs}
    for info in exits:
        layers = manifest.model.num_layers - info.tail_layers - info.checkpoint
        whole = sum(segment.parameters for segment in manifest.segments) / manifest.model.num_layers
        if whole and kv_fill_graph(info) in parameters:
            return parameters[kv_fill_graph(info)] / layers / whole
    return 0.0
