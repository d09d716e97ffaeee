"""Lower a traced model to the graphs of a target: whole-model passes, cut, passes on each graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import UNCUT, batched_graph

from tide_export.advance_graph import advance_graph
from tide_export.cut import CutGraph, LoweredModel, cut, cut_kv_fill, keep_boundaries, loop_starts, mark_boundaries, name_values
from tide_export.draft_graph import DraftWeights, draft_graph_model
from tide_export.loop_graph import cut_loop
from tide_export.passes.base import GraphPass, LoweringContext, PassReport, run_passes
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
    draft: DraftWeights | None = None,
) -> LoweredModel:
    """Cut a prepared model at ``checkpoints`` and lower each segment, the head and the graphs of ``exits``.

    Args:
        skips: exits that tokens may stop at, whose ``kv_fill`` graphs and scattered forms are wanted if the target has them.
        draft: the draft head, if there is one; ``checkpoints`` include its layer. Targets that do not run it leave it out.
    """
    graphs = [*cut(keep_boundaries(traced, checkpoints), traced.num_layers), *exits]
    reports: list[PassReport] = []
    for graph in graphs:
        reports += run_passes(graph.model, target.pieces, context)
    forms = list[CutGraph]()
    scatters = bool(skips) and not any(info.tail_layers for info in skips)  # prompts cannot stop at exits with tails
    for segment in [graph for graph in graphs if graph.layers is not None]:
        for passes in (target.batched_form, target.scattered_form if scatters else ()):
            reports += _lower_form(segment, passes, forms, context)
    for graph in graphs:
        reports += run_passes(graph.model, target.padded, context)
    if traced.is_recurrent:
        forms.append(advance_graph(graphs))
    if target.uncut and checkpoints:
        forms += _lower_uncut(traced, target, checkpoints, context, draft.layer if draft is not None and target.drafts else None)
    if target.uncut and loop_starts(traced.model.graph) and not context.kv_scales:  # which differ from loop to loop
        loop = cut_loop(traced)
        run_passes(loop.model, (*target.pieces, *target.padded), context)
        forms.append(loop)
    for info in skips if target.kv_fill else ():
        graphs.append(cut_kv_fill(traced, info))
        reports += run_passes(graphs[-1].model, target.kv_fill, context)
    drafting = None
    if draft is not None and target.drafts:
        drafting = draft_graph_model(traced, draft.tensors)
        run_passes(drafting.model, target.pieces, context)
    return LoweredModel(graphs, forms, reports, drafting)


def _lower_uncut(
    traced: TracedModel, target: Target, checkpoints: Sequence[int], context: LoweringContext, states_after: int | None
) -> list[CutGraph]:
    """All segments as one graph, in every form for tokens in the text's order. The reports are dropped: they would repeat those
    of the segments.

    The cuts are marked by nodes, so that no pass fuses across one: the kernel of a fused sum and norm rounds otherwise than the
    two kernels of segments, in which `exact` verifies drafts, and its text would differ from `full`'s.
    """
    whole = cut(mark_boundaries(traced, checkpoints), traced.num_layers, states_after)[0]
    whole.model.graph.name = UNCUT
    made = [CutGraph(UNCUT, whole.model, whole.layers)]
    run_passes(whole.model, target.pieces, context)
    _lower_form(made[0], target.batched_form, made, context)
    run_passes(whole.model, target.padded, context)
    return made


def _lower_form(
    segment: CutGraph, passes: Sequence[GraphPass], forms: list[CutGraph], context: LoweringContext
) -> list[PassReport]:
    """Add the form of a lowered segment that ``passes`` make, which shares its weights, unless no pass changed it."""
    if not passes:
        return []
    name, copy = batched_graph(segment.name), segment.model.clone()
    copy.graph.name = name
    reports = run_passes(copy, passes, context)
    if any(report.applied for report in reports):
        forms.append(CutGraph(name, copy, segment.layers))
    return reports
