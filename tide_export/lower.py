"""From a traced model to the graphs of a target: whole-model passes, cut, passes on each piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from tide_export.cut import CutGraph, cut, keep_boundaries, name_values, unsplit
from tide_export.passes.base import LoweringContext, PassReport, run_passes
from tide_export.targets.base import Target
from tide_export.trace import TracedModel


@dataclass(frozen=True)
class LoweredModel:
    """A target's graphs, ready to write, and what each pass did."""

    graphs: list[CutGraph]
    reports: list[PassReport]

    @property
    def applied(self) -> dict[str, int]:
        """Pass name → how often it fired, over all graphs."""
        counts: Counter[str] = Counter()
        for report in self.reports:
            counts[report.name] += report.applied
        return dict(counts)


def explain(reports: Sequence[PassReport]) -> list[str]:
    """One line per pass and reason for not applying it, with the number of places."""
    reasons = Counter((report.name, reason.split(": ", 1)[1]) for report in reports for reason in report.skipped)
    return [f"{name} left {count} places alone: {reason}" for (name, reason), count in reasons.items()]


def prepare(traced: TracedModel, target: Target, context: LoweringContext) -> list[PassReport]:
    """The target's whole-model passes, in place on the traced graph."""
    name_values(traced, context.max_seq_len)
    return run_passes(traced.model, target.whole, context)


def lower(traced: TracedModel, target: Target, checkpoints: Sequence[int], context: LoweringContext) -> LoweredModel:
    """Cut a prepared model at ``checkpoints`` and lower each piece."""
    graphs = cut(keep_boundaries(traced, checkpoints), traced.num_layers)
    reports: list[PassReport] = []
    for graph in graphs:
        reports += run_passes(graph.model, target.pieces, context)
    return LoweredModel(graphs, reports)


def lower_unsplit(traced: TracedModel, target: Target, context: LoweringContext) -> ir.Model:
    """The prepared model as one graph with the same lowering: the baseline that segments are measured against."""
    model = unsplit(keep_boundaries(traced, []), traced.num_layers)
    run_passes(model, target.pieces, context)
    return model
