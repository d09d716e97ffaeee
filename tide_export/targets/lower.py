"""Lower a traced model to the graphs of a target: whole-model passes, cut, passes on each graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir
from tide_runtime.bundle.manifest import UNCUT

from tide_export.drafters.draft_graph import TracedDrafter, finished, join_embedding, keep_wanted
from tide_export.graphs.advance_graph import advance_graph
from tide_export.graphs.cut import CutGraph, LoweredModel, TappedStates, cut, keep_boundaries, loop_starts, name_values
from tide_export.graphs.loop_graph import cut_loop
from tide_export.passes.base import LoweringContext, PassReport, run_passes
from tide_export.passes.quantize_weights import QuantizeWeights
from tide_export.targets.base import Target
from tide_export.trace.trace_model import TracedModel
from tide_export.weights.deferred_weight import LowBits


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
    draft: TracedDrafter | None = None,
) -> LoweredModel:
    """Cut a prepared model at ``checkpoints`` and lower each segment, the head and the graphs of ``exits``.

    Args:
        draft: the draft head, if there is one. Targets that do not run it leave it out.
    """
    draft = draft if target.drafts else None
    taps = draft.taps if draft is not None else ()
    graphs = [*cut(keep_boundaries(traced, checkpoints, taps), traced.num_layers), *exits]
    reports: list[PassReport] = []
    for graph in graphs:
        reports += run_passes(graph.model, target.pieces, context)
    forms = list[CutGraph]()
    for graph in graphs:
        reports += run_passes(graph.model, target.padded, context)
    if traced.is_recurrent:
        forms.append(advance_graph(graphs))
    if draft is not None or (target.uncut and checkpoints):
        tapped = _tapped(draft, target, context) if draft is not None else None
        forms += _lower_uncut(traced, target, [*checkpoints, *taps], context, tapped)
    if target.uncut and loop_starts(traced.model.graph) and not context.kv_scales:  # which differ from loop to loop
        loop = cut_loop(traced)
        run_passes(loop.model, (*target.pieces, *target.padded), context)
        forms.append(loop)
    return LoweredModel(graphs, forms, reports, _lower_draft(traced, target, draft, context) if draft is not None else None)


def _lower_uncut(
    traced: TracedModel, target: Target, marks: Sequence[int], context: LoweringContext, tapped: TappedStates | None
) -> list[CutGraph]:
    """All segments as one graph, in every form for tokens in the text's order. The reports are dropped: they would repeat those
    of the segments.

    The cuts are marked by nodes, so that no pass fuses across one: the kernel of a fused sum and norm rounds otherwise than the
    two kernels of segments, in which `exact` verifies drafts, and its text would differ from `full`'s. States that a draft head
    reads are marked in the segments too, for the same reason.
    """
    whole = cut(keep_boundaries(traced, (), marks), traced.num_layers, tapped)[0]
    whole.model.graph.name = UNCUT
    made = [CutGraph(UNCUT, whole.model, whole.layers)]
    run_passes(whole.model, target.pieces, context)
    run_passes(whole.model, target.padded, context)
    return made


def _tapped(draft: TracedDrafter, target: Target, context: LoweringContext) -> TappedStates:
    """Its matrix has 8 bits where the model's have few: a step waits for the memory of both."""
    fuse = draft.fuse.clone()
    _prepare_drafter(fuse, target, context, draft.weights if context.quantized else {})
    return TappedStates(draft.taps, fuse, all_tokens=draft.kv is not None)


def _lower_draft(traced: TracedModel, target: Target, draft: TracedDrafter, context: LoweringContext) -> CutGraph:
    """The graph of the draft head; reports are dropped, because they describe the model."""
    step = draft.step.clone()
    own = replace(context, long_rotary_from=None)  # its rotary embedding has one set of factors
    _prepare_drafter(step, target, own, draft.weights)
    join_embedding(step, traced)
    run_passes(step, target.pieces, own)
    keep_wanted(step)
    run_passes(step, target.padded, own)
    return finished(step)


def _prepare_drafter(model: ir.Model, target: Target, context: LoweringContext, weights: Mapping[str, LowBits]) -> None:
    """The target's whole-model passes on a graph of a drafter, whose low-bit ``weights`` have 8 bits."""
    others = (graph_pass for graph_pass in target.whole if not isinstance(graph_pass, QuantizeWeights))
    run_passes(model, (QuantizeWeights((8,)), *others), replace(context, quantized=weights))
