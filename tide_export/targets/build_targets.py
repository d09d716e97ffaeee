"""Lower one traced model for several targets and compile each; a failed target does not affect the others."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from tide_runtime.bundle.manifest import SCORE, GraphInfo, TargetInfo
from tide_runtime.errors import TargetError, TideError

from tide_export.bundle_writer import ONNX_FOLDER, describe
from tide_export.drafters.draft_graph import TracedDrafter
from tide_export.graphs.cut import CutGraph, LoweredModel, name_values
from tide_export.passes.base import GraphPass, LoweringContext, PassReport, run_passes
from tide_export.passes.quantize_weights import QUANTIZE_WEIGHTS, QuantizeWeights
from tide_export.targets.base import BuildJob, Target
from tide_export.targets.engines import ENGINE_FOLDER
from tide_export.targets.lower import lower
from tide_export.trace.trace_model import TracedModel


@dataclass(frozen=True)
class Cuts:
    """Checkpoints and the graphs of exits.

    Args:
        draft: the draft head; None: there is none.
    """

    checkpoints: Sequence[int]
    exits: Sequence[CutGraph] = ()
    draft: TracedDrafter | None = None


@dataclass
class BuiltTargets:
    """``targets``: manifest entries by name; ``graphs``: the graphs' interface, taken from the first target."""

    targets: dict[str, TargetInfo] = field(default_factory=dict)
    graphs: list[GraphInfo] = field(default_factory=list)


def build_targets(
    traced: TracedModel,
    targets: Sequence[Target],
    cuts: Cuts,
    context: LoweringContext,
    job: BuildJob,
    on_lowered: Callable[[LoweredModel], None],
) -> BuiltTargets:
    """Compile for each of ``targets``; failures are reported to ``job.progress``.

    Args:
        on_lowered: called with each lowered model once, even if several targets share it.

    Raises TargetError, or the error of the only target, if none could be built.
    """
    if not context.quantized:  # targets that take other low-bit weights can then share all passes
        targets = [replace(t, whole=tuple(p for p in t.whole if not isinstance(p, QuantizeWeights))) for t in targets]
    lowerings: dict[object, LoweredModel] = {}
    built = BuiltTargets()
    errors = []
    with job.progress.phase("fold constants"):
        prepared = _prepare(traced, targets, context)
    for target in targets:
        try:
            if not target.scores_logits and any(graph.name.startswith(SCORE) for graph in cuts.exits):
                raise TargetError(f"target {target.name} runs no router that reads the head's logits; compile for cpu")
            if target.lowering not in lowerings:
                lowerings[target.lowering] = _lower(prepared, target, cuts, context, job)
                on_lowered(lowerings[target.lowering])
            lowered = lowerings[target.lowering]
            for reason, count in low_bits_lost(lowered.reports).items():
                job.progress.note(f"{target.name}: low-bit weights that are dequantised: {count}, because {reason}")
            graphs = [describe(graph) for graph in lowered.graphs]
            built.targets[target.name] = target.builder.build(target, lowered, job)
            built.graphs = built.graphs or graphs
        except OSError:  # e.g. a full disk, which fails the other targets too
            raise
        except Exception as error:  # compilers raise their own classes
            _remove_files(job, target)
            errors.append(_as_tide_error(error))
            job.progress.failed(target.name, str(errors[-1]))
    if not built.targets:
        raise errors[0] if len(errors) == 1 else TargetError("; ".join(map(str, errors)))
    return built


def low_bits_lost(reports: Sequence[PassReport]) -> Counter[str]:
    """Reason → number of products and look-ups that do not take their low-bit weight as it is."""
    return Counter(
        skipped.split(": ", 1)[1] for report in reports if report.name == QUANTIZE_WEIGHTS for skipped in report.skipped
    )


def _as_tide_error(error: Exception) -> TideError:
    if isinstance(error, TideError):
        return error
    wrapped = TargetError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


@dataclass(frozen=True)
class _Prepared:
    """The traced model after the leading passes that all targets share."""

    traced: TracedModel
    passes: tuple[GraphPass, ...]
    reports: list[PassReport]


def _prepare(traced: TracedModel, targets: Sequence[Target], context: LoweringContext) -> _Prepared:
    in_turn = zip(*(target.whole for target in targets), strict=False)
    common = tuple(passes[0] for passes in takewhile(lambda passes: len(set(passes)) == 1, in_turn))
    name_values(traced)
    return _Prepared(traced, common, run_passes(traced.model, common, context))


def _lower(prepared: _Prepared, target: Target, cuts: Cuts, context: LoweringContext, job: BuildJob) -> LoweredModel:
    """Lower copies of the model and the exits' graphs, because the next target needs the originals."""
    with job.progress.phase(f"lower and cut for {target.name}"):
        copy = TracedModel(prepared.traced.model.clone(), prepared.traced.layers)
        exits = [CutGraph(graph.name, graph.model.clone(), graph.layers) for graph in cuts.exits]
        rest = run_passes(copy.model, target.whole[len(prepared.passes) :], context)
        lowered = lower(copy, target, cuts.checkpoints, context, exits, cuts.draft)
    return replace(lowered, reports=[*prepared.reports, *rest, *lowered.reports])


def _remove_files(job: BuildJob, target: Target) -> None:
    shutil.rmtree(job.directory / ENGINE_FOLDER / target.name, ignore_errors=True)
    for file in (job.directory / ONNX_FOLDER).glob(f"{target.name}.*"):
        file.unlink()
