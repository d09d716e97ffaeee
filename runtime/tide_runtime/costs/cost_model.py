"""The cost model: the time of launches, for the depth policies and for the speeds that a calibration expects alike.

A launch is a graph on so many tokens, whose parts `StepCost` has: `CostModel` adds them up to milliseconds.

Figures of exits come from the bundle's calibration, not from the machine that runs, so that what policy ``exit`` decides, and
with it its text, is the same on every machine. Where a decision does not change the text, passes through all layers are priced
as measured here (`Backend.pass_costs`), and the calibration's figures are scaled to them. With neither, a layer counts as 1 and a
batch of 4 tokens as 1.24 tokens, with low-bit weights as 2.2: ONNX Runtime's low-bit products gain little from further tokens
(MatMulNBits of 4 and 8 bits took 2.1 to 4.9 times as long for 8 tokens as for one, on two cores with AVX512-VNNI).

Left out are terms that decide nothing, as predictions miss by up to 40%: tokens that pad a shorter sequence, drawing a token at
random, and layers that stay in the processor's caches between early stops. The last changed the predicted speedup of one model on
one machine by 0, 0 and 11% in three calibrations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import cache

import numpy as np

from tide_runtime.backends.step_arrays import rounded_tokens
from tide_runtime.bundle.calibration import CostTable, StepCost
from tide_runtime.bundle.exits import Exit
from tide_runtime.bundle.manifest import UNCUT, Manifest

_EXTRA_TOKEN, _LOW_BIT_EXTRA_TOKEN = 0.08, 0.4  # time of each further token of a step, over that of the first
_PARTS = tuple(part.name for part in fields(StepCost) if part.name not in ("rows", "seq"))


class StepTable:
    """Measured step costs, read at any size: linear between measured sizes, and beyond them along the last two, never falling."""

    def __init__(self, steps: Iterable[StepCost]) -> None:
        ordered = sorted(steps, key=lambda step: (step.rows, step.seq))
        self._measured = {rows: [step for step in ordered if step.rows == rows] for rows in {step.rows for step in ordered}}
        self.step = cache(self._step)

    @staticmethod
    def of(table: CostTable | None, low_bits: bool = False) -> StepTable:
        """The table of a calibration; a guess where it has none. ``low_bits``: whether the model's weights have few bits."""
        if table is None or not table.steps:
            extra = _LOW_BIT_EXTRA_TOKEN if low_bits else _EXTRA_TOKEN
            return StepTable(StepCost(1, s, 0.1, 1 + extra * (s - 1), head_ms=1.4, exit_ms=0.2, host_ms=0.1) for s in (1, 64))
        return StepTable(table.steps)

    def _step(self, batch_size: int, tokens: int, longest: int | None = None) -> StepCost:
        """The cost of a step at the nearest measured batch size. Uneven steps are rounded up as backends do it."""
        if longest is not None and tokens != batch_size * longest:
            tokens = rounded_tokens(tokens, batch_size * longest)
        nearest = min(sorted(self._measured), key=lambda measured: abs(measured - batch_size))
        steps = self._measured[nearest]
        seq = tokens / nearest
        sizes = [step.seq for step in steps]
        beyond = max(0.0, seq - sizes[-1])
        parts = {}
        for name in _PARTS:
            values = [getattr(step, name) for step in steps]
            slope = max(0.0, (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])) if len(sizes) > 1 else 0.0
            parts[name] = float(np.interp(seq, sizes, values)) + slope * beyond
        return StepCost(batch_size, seq, **parts)


class CostModel:
    """Milliseconds (without a calibration: layers) of launches of a model whose segments lie between ``edges``.

    Args:
        table: measured costs; None: a guess.
        edges: 0, the checkpoint layers, and the number of layers, rising: where the model is cut.
        whole_launches: launches of a pass through all layers: 1 where the uncut graph is there.
        low_bits: whether the weights are low-bit, for the guess.
        passes: whole passes as measured on this machine; None: they follow from ``table``.
    """

    def __init__(
        self,
        table: CostTable | None,
        edges: Sequence[int],
        whole_launches: int = 1,
        low_bits: bool = False,
        passes: CostTable | None = None,
    ) -> None:
        self._whole_launches, self.edges = whole_launches, edges
        self._passes = StepTable.of(passes) if passes is not None else None
        if passes is not None and table is not None:
            table = _scaled(table, passes.unsplit_ms / table.unsplit_ms)
        self._table = StepTable.of(table, low_bits)
        self._step = self._table.step
        self.num_segments = len(edges) - 1
        self.full = cache(self._full)
        self.evaluation = cache(self._evaluation)  # needed for every token that an exit is evaluated for

    @classmethod
    def of(cls, manifest: Manifest, passes: CostTable | None = None) -> CostModel:
        """The model of a bundle; ``passes``: see `CostModel`."""
        table = manifest.calibration.costs if manifest.calibration is not None else None
        edges = [0, *manifest.checkpoints, manifest.model.num_layers]
        uncut = any(UNCUT in target.graphs for target in manifest.targets.values())
        return cls(table, edges, 1 if uncut else len(edges) - 1, bool(manifest.weights), passes)

    def run(self, first: int, end: int, batch_size: int = 1, tokens: int = 1, longest: int | None = None) -> float:
        """ms of segments ``first`` … ``end - 1`` on ``tokens`` tokens of ``batch_size`` sequences.

        ``longest``: tokens of the longest sequence; None: all have as many.
        """
        cost = self._step(batch_size, tokens, longest)
        return (end - first) * cost.launch_ms + (self.edges[end] - self.edges[first]) * cost.layer_ms

    def finish(
        self, first: int, batch_size: int = 1, tokens: int = 1, longest: int | None = None, logits: int | None = None
    ) -> float:
        """ms of the remaining segments, from boundary ``first`` on, for tokens that wait there.

        ``logits``: tokens that the head computes logits of; None: all.
        """
        head = self._step(batch_size, tokens, longest) if logits is None else self._step(batch_size, logits)
        return self.run(first, self.num_segments, batch_size, tokens, longest) + head.logits_ms + self._turn(batch_size)

    def early_exit_token(self, exits: Sequence[Exit], evaluated: Sequence[int], waited: int) -> float:
        """One token of one sequence under policy ``exit``, in full-depth decode steps.

        Args:
            evaluated: which of ``exits`` were evaluated. The segments before the others are run where the token goes on.
            waited: tokens that wait for the remaining layers, this one included; 0: it stopped at the last evaluated exit.
        """
        ms = 0.0
        first = 0
        for early_exit, was_evaluated in zip(exits, evaluated, strict=True):
            if was_evaluated:
                ms += self.evaluation(1, first, early_exit)
            elif waited:
                ms += self.run(first, early_exit.boundary)
            first = early_exit.boundary
        if waited:
            ms += self.finish(first, tokens=waited, logits=1)
        return ms / self.full(1, 1, 1)

    def _evaluation(self, batch_size: int, first: int, early_exit: Exit, with_head: bool = True) -> float:
        """ms of a token of each sequence from boundary ``first`` to ``early_exit``, which is evaluated there.

        ``with_head``: not only its MLP.
        """
        cost = self._step(batch_size, batch_size)
        ms = self.run(first, early_exit.boundary, batch_size, batch_size)
        graphs = (early_exit.graph is not None) + (with_head and early_exit.score_graph is not None)
        ms += graphs * cost.exit_ms  # their own launches included
        if with_head and early_exit.info.tail_layers:
            ms += self.run(self.num_segments - 1, self.num_segments, batch_size, batch_size) + cost.logits_ms
        elif with_head:
            ms += cost.launch_ms + cost.logits_ms
        return ms + self._turn(batch_size)

    def _turn(self, batch_size: int) -> float:
        """ms of the runtime's loop around an evaluation of exits, or a verification of drafts."""
        cost = self._step(batch_size, batch_size)
        return cost.host_ms + cost.extra_host_ms

    def draft_head(self, pairs: int, first: bool) -> float:
        """ms of a launch of the draft head on so many ``pairs``: the ``first`` one after a pass, or a further one.

        For models of measured passes only.
        """
        assert self._passes is not None
        cost = self._passes.step(1, pairs)
        return cost.exit_ms if first else cost.logits_ms

    def packed(self, batch_size: int, decoded: int, prompt_tokens: int) -> float:
        """ms of all layers for ``decoded`` tokens of ``batch_size`` sequences, with the head, and ``prompt_tokens`` without."""
        tokens = decoded + prompt_tokens
        return self._pass(max(1, batch_size), tokens, None, decoded / tokens, verifies=False)

    def _full(self, batch_size: int, tokens: int, longest: int) -> float:
        """ms of all layers, the head on every token, and the loop around them, which takes longer where drafts are verified."""
        return self._pass(batch_size, tokens, longest, 1.0, verifies=tokens > batch_size)

    def _pass(self, batch_size: int, tokens: int, longest: int | None, logits: float, verifies: bool) -> float:
        if self._passes is not None:
            return self._passes.step(batch_size, tokens, longest).layer_ms
        cost = self._step(batch_size, tokens, longest)
        layers = self._whole_launches * cost.launch_ms + self.edges[-1] * cost.layer_ms + logits * cost.logits_ms
        return layers + (cost.host_ms + cost.extra_host_ms if verifies else cost.host_ms)


def _scaled(table: CostTable, factor: float) -> CostTable:
    """``table`` with all times multiplied by ``factor``."""
    steps = [replace(step, **{part: factor * getattr(step, part) for part in _PARTS}) for step in table.steps]
    return replace(table, steps=steps, unsplit_ms=factor * table.unsplit_ms)
