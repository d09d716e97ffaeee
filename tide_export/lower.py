"""From a traced model to the graphs of a target: whole-model passes, cut, passes on each piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tide_runtime.calibration import ExitInfo
from tide_runtime.manifest import UNCUT, batched_graph

from tide_export.cut import CutGraph, cut, keep_boundaries, name_values
from tide_export.kv_fill import cut_kv_fill
from tide_export.passes.base import LoweringContext, PassReport, run_passes
from tide_export.targets.base import Target
from tide_export.trace import TracedModel


@dataclass(frozen=True)
class LoweredModel:
    """A target's graphs, ready to write, and what each pass did. ``forms``: of segments, for several rows or uncut."""

    graphs: list[CutGraph]
    forms: list[CutGraph]
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
    name_values(traced)
    return run_passes(traced.model, target.whole, context)


def lower(
    traced: TracedModel,
    target: Target,
    checkpoints: Sequence[int],
    context: LoweringContext,
    exits: Sequence[CutGraph] = (),
    skips: Sequence[ExitInfo] = (),
) -> LoweredModel:
    """Cut a prepared model at ``checkpoints`` and lower each piece, and the graphs of its ``exits`` like them.

    Args:
        skips: exits for which to make the graph that fills the caches of the layers they skip, where the target has such.
    """
    graphs = [*cut(keep_boundaries(traced, checkpoints), traced.num_layers), *exits]
    reports: list[PassReport] = []
    for graph in graphs:
        reports += run_passes(graph.model, target.pieces, context)
    forms = []
    for graph in graphs:
        if graph.layers is not None and target.several_rows:
            form, made = lower_several_rows(graph, target, context)
            forms.append(form)
            reports += made
    if target.uncut and checkpoints:
        forms += _lower_uncut(traced, target, context)
    for info in skips if target.kv_fill else ():
        graphs.append(cut_kv_fill(traced, info))
        reports += run_passes(graphs[-1].model, target.kv_fill, context)
    return LoweredModel(graphs, forms, reports)


def _lower_uncut(traced: TracedModel, target: Target, context: LoweringContext) -> list[CutGraph]:
    """All segments as one graph, in every form. What the passes do there they have done to the segments, and reported."""
    whole = cut(keep_boundaries(traced, ()), traced.num_layers)[0]
    whole.model.graph.name = UNCUT
    uncut = CutGraph(UNCUT, whole.model, whole.layers)
    run_passes(uncut.model, target.pieces, context)
    return [uncut, lower_several_rows(uncut, target, context)[0]] if target.several_rows else [uncut]


def lower_several_rows(segment: CutGraph, target: Target, context: LoweringContext) -> tuple[CutGraph, list[PassReport]]:
    """The form of a lowered segment for steps of several rows; its weights are the same tensors."""
    name, copy = batched_graph(segment.name), segment.model.clone()
    copy.graph.name = name
    return CutGraph(name, copy, segment.layers), run_passes(copy, target.several_rows, context)
