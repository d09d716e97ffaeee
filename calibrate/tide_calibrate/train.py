"""The training phase: capture states, train a head and a router at every candidate exit, and trace them on other text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from tide_runtime.errors import ParamsError

from tide_calibrate.capture.capture import capture
from tide_calibrate.capture.reference import ReferenceTokens
from tide_calibrate.capture.store import Capture
from tide_calibrate.config import CalibrationConfig, candidate_layers
from tide_calibrate.exit_heads import ExitHead, make_head, parse_kind
from tide_calibrate.exit_heads.train import HeadTraining, train_head
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.parallel import Check, in_parallel
from tide_calibrate.routers import TRAINING_FREE, MlpRouter
from tide_calibrate.routers.train import Label, RouterTraining, train_router
from tide_calibrate.text.documents import SplitName, SplitText
from tide_calibrate.traces.continuations import continue_prompts, generated_tokens
from tide_calibrate.traces.record import trace_split
from tide_calibrate.traces.trace import Exit, SplitTrace
from tide_export.load import LoadedModel
from tide_export.progress import ExportProgress

STEPS_FROM_NEIGHBOUR, _CHECK_EVERY = 48, 24
# Two thirds of RouterTraining's default, because a router is trained for every exit. On the demo model stock this costs 0.003
# (tail:2) to 0.015 (linear) of the area under the agreement–coverage curve.
_ROUTER_WINDOWS, _ROUTER_HELD_OUT = 64, 16
_TEST_WINDOWS = 40  # for the agreement of all heads: 10,240 tokens, a standard error of at most 0.5%


@dataclass(frozen=True)
class TrainedExit:
    """An exit head and the MLP router trained for it."""

    head: ExitHead
    router: MlpRouter


@dataclass(frozen=True)
class Learned:
    """Trained exits and their traces.

    Args:
        test: trace of the test text.
        own_threshold, own_test: traces of the model's greedy continuations of prompts from the threshold and the test split.
    """

    model: FrozenModel
    capture: Capture
    exits: dict[Exit, TrainedExit]
    test: SplitTrace
    own_threshold: SplitTrace
    own_test: SplitTrace


def learn(loaded: LoadedModel, text: SplitText, work: Path, config: CalibrationConfig, progress: ExportProgress) -> Learned:
    """Capture states of ``text`` in the folder ``work``, then train and trace every exit that ``config`` lists."""
    model = FrozenModel(loaded.model)
    exits = exits_to_train(candidate_layers(config.candidates, model.num_layers), config.head_kinds, model.num_layers)
    layers = captured_layers(exits, model.num_layers)
    run = partial(capture, hidden_dtype="bfloat16" if config.dtype == "bf16" else "float16", progress=progress)
    with progress.phase(f"capture {text.windows.total_tokens:,} tokens"):
        captured = run(loaded, text.windows, text.split, layers, work / "text")
    with progress.phase(f"generate continuations of {config.prompts} prompts"):
        own, prompt_lengths = continue_prompts(loaded.model, text.windows, text.split, config.prompts, config.new_tokens)
        own_captured = run(loaded, own, text.split, layers, work / "continuations")
    with progress.phase(f"train {len(exits)} exits"):
        trained = train_exits(model, captured, exits, config, progress)
    with progress.phase("trace the exits"):
        test = trace_exits(model, captured, "test", trained, _TEST_WINDOWS)
        own_traces = [trace_exits(model, own_captured, split, trained) for split in ("threshold", "test")]
    own_threshold, own_test = (generated_tokens(trace, own, prompt_lengths) for trace in own_traces)
    return Learned(model, captured, trained, test, own_threshold, own_test)


def exits_to_train(candidates: Sequence[int], kinds: Sequence[str], num_layers: int) -> list[Exit]:
    """Every head at every candidate where it skips at least one layer.

    Raises ParamsError when a head skips nothing at any candidate.
    """
    exits = [(layer, kind) for layer in candidates for kind in kinds if layer + parse_kind(kind)[1] < num_layers]
    useless = [kind for kind in kinds if not any(kind == other for _, other in exits)]
    if useless:
        raise ParamsError(
            f"the head {useless[0]} skips nothing after any of the candidates {', '.join(map(str, candidates))} "
            f"of a model of {num_layers} layers; give shallower candidates or a shorter head"
        )
    return exits


def captured_layers(exits: Sequence[Exit], num_layers: int) -> list[int]:
    """Boundaries (in layers run) whose states the heads read, and the final one."""
    tails = {num_layers - parse_kind(kind)[1] for _, kind in exits}
    return sorted({layer for layer, _ in exits} | tails | {num_layers})


def train_exits(
    model: FrozenModel, capture: Capture, exits: Sequence[Exit], config: CalibrationConfig, progress: ExportProgress
) -> dict[Exit, TrainedExit]:
    """Train all of ``exits`` on the train split: one chain of heads per kind, then all the routers."""
    rank = min(config.rank, model.hidden_size)
    heads = {(layer, kind): make_head(kind, model, layer, rank, config.seed) for layer, kind in exits}
    kinds = sorted({kind for _, kind in exits}, key=lambda kind: -parse_kind(kind)[1])  # longest jobs first
    chains = [[heads[key] for key in sorted(exits, reverse=True) if key[1] == kind] for kind in kinds]
    jobs = [partial(_train_chain, chain, capture, config.seed) for chain in chains]
    for kind, agreement in zip(kinds, in_parallel(jobs), strict=True):
        progress.note(f"{kind}: {agreement}")
    training = RouterTraining(cast(Label, config.label), _ROUTER_WINDOWS, _ROUTER_HELD_OUT, seed=config.seed)
    routers = in_parallel([partial(_train_router, heads[key], capture, training) for key in exits])
    return {key: TrainedExit(heads[key], router) for key, router in zip(exits, routers, strict=True)}


def trace_exits(
    model: FrozenModel,
    capture: Capture,
    split: SplitName,
    exits: Mapping[Exit, TrainedExit],
    max_windows: int | None = None,
    reference: ReferenceTokens | None = None,
) -> SplitTrace:
    """Evaluate ``exits`` on the tokens of ``split``, on at most ``max_windows`` windows; one parallel job per checkpoint.

    ``reference``: count agreement with these tokens instead of the full model's.
    """
    checkpoints = sorted({layer for layer, _ in exits})
    groups = [{key: trained for key, trained in exits.items() if key[0] == layer} for layer in checkpoints]
    lm_head = model.lm_head  # built before the jobs start, which share it

    def job(group: Mapping[Exit, TrainedExit], check: Check) -> SplitTrace:
        check()
        heads = {key: trained.head for key, trained in group.items()}
        routers = {key: (*TRAINING_FREE, trained.router) for key, trained in group.items()}
        return trace_split(capture, split, lm_head, heads, routers, max_windows, reference)

    parts = list(in_parallel([partial(job, group) for group in groups]))
    traced = {key: trace for part in parts for key, trace in part.exits.items()}
    return replace(parts[0], exits={key: traced[key] for key in exits})


def _train_chain(heads: Sequence[ExitHead], capture: Capture, seed: int, check: Check) -> str:
    """Train heads of one kind, deepest first, each initialized with the weights of its deeper neighbour.

    Neighbouring layers need nearly the same translator: 48 steps from a neighbour's reach what 160 steps from scratch do
    (demo model stock after layer 8, agreement on 16 held-out windows: linear 40.6% against 40.5%, tail:2 60.2% against 60.3%).

    Returns:
        The agreement of every head as text, shallow first.
    """
    summary = []
    for neighbour, head in zip([None, *heads[:-1]], heads, strict=True):
        if neighbour is not None:
            for parameter, start in zip(head.trained(), neighbour.trained(), strict=True):
                parameter.data.copy_(start)
        steps = HeadTraining().steps if neighbour is None else STEPS_FROM_NEIGHBOUR
        _, history = train_head(head, capture, HeadTraining(steps=steps, check_every=_CHECK_EVERY, seed=seed), check)
        best = min(history, key=lambda progress: progress.divergence)
        summary.append(f"{best.agreement:.1%} after layer {head.checkpoint}")
    return ", ".join(reversed(summary))


def _train_router(head: ExitHead, capture: Capture, training: RouterTraining, check: Check) -> MlpRouter:
    check()
    return train_router(head, capture, training)
