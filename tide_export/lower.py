"""From a traced model to the graphs of a target: whole-model passes, cut, passes on each piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import UNCUT, batched_graph, ragged_graph

from tide_export.cut import CutGraph, LoweredModel, cut, keep_boundaries, name_values
from tide_export.kv_fill import cut_kv_fill
from tide_export.passes.base import LoweringContext, PassReport, run_passes
from tide_export.targets.base import Target
from tide_export.trace import TracedModel


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
        if graph.layers is not None:
            made, done = _lower_forms(graph, target, context)
            forms += made
            reports += done
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
    return [uncut, *_lower_forms(uncut, target, context)[0]]


def _lower_forms(segment: CutGraph, target: Target, context: LoweringContext) -> tuple[list[CutGraph], list[PassReport]]:
    """The further forms of a lowered segment; their weights are the same tensors. One that nothing was done to is none."""
    forms, reports = [], list[PassReport]()
    wanted = ((batched_graph, target.several_rows), (ragged_graph, target.ragged_rows))
    for named, passes in ((named, passes) for named, passes in wanted if passes):
        name, copy = named(segment.name), segment.model.clone()
        copy.graph.name = name
        made = run_passes(copy, passes, context)
        if any(report.applied for report in made):
            forms.append(CutGraph(name, copy, segment.layers))
        reports += made
    return forms, reports
