"""Lower a traced model to the graphs of a target: whole-model passes, cut, passes on each graph."""

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
    """Cut a prepared model at ``checkpoints`` and lower each segment, the head and the graphs of ``exits``.

    Args:
        skips: exits whose ``kv_fill`` graph is wanted; ignored if the target has no such graphs.
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
    """All segments as one graph, in every form. The reports are dropped: they would repeat those of the segments."""
    whole = cut(keep_boundaries(traced, ()), traced.num_layers)[0]
    whole.model.graph.name = UNCUT
    uncut = CutGraph(UNCUT, whole.model, whole.layers)
    run_passes(uncut.model, target.pieces, context)
    return [uncut, *_lower_forms(uncut, target, context)[0]]


def _lower_forms(segment: CutGraph, target: Target, context: LoweringContext) -> tuple[list[CutGraph], list[PassReport]]:
    """The batched and ragged forms of a lowered segment, which share its weights. A form that no pass changed is omitted."""
    forms, reports = [], list[PassReport]()
    wanted = ((batched_graph, target.batched_form), (ragged_graph, target.ragged_form))
    for form_name, passes in ((form_name, passes) for form_name, passes in wanted if passes):
        name, copy = form_name(segment.name), segment.model.clone()
        copy.graph.name = name
        done = run_passes(copy, passes, context)
        if any(report.applied for report in done):
            forms.append(CutGraph(name, copy, segment.layers))
        reports += done
    return forms, reports
