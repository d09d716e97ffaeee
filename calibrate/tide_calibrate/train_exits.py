"""Train every exit head and its router at every candidate, and trace what they say of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from tide_runtime.errors import ParamsError

from tide_calibrate.capture_store import Capture, SplitName
from tide_calibrate.config import CalibrationConfig
from tide_calibrate.evaluate import trace_split
from tide_calibrate.exit_heads import ExitHead, make_head, parse_kind
from tide_calibrate.frozen_model import FrozenModel
from tide_calibrate.parallel import Check, in_parallel
from tide_calibrate.routers import TRAINING_FREE, MlpRouter
from tide_calibrate.traces import SplitTrace
from tide_calibrate.train_heads import HeadTraining, train_head
from tide_calibrate.train_routers import Label, RouterTraining, train_router
from tide_export.progress import ExportProgress

Exit = tuple[int, str]  # checkpoint, head
_STEPS_FROM_NEIGHBOUR, _CHECK_EVERY = 48, 24
# Every exit has a router here: two thirds of the text that one alone would get. On the demo model stock this costs 0.003 (tail:2)
# to 0.015 (linear) of the area under agreement–coverage.
_ROUTER_WINDOWS, _ROUTER_HELD_OUT = 64, 16


@dataclass(frozen=True)
class TrainedExit:
    """A head and the MLP that judges it."""

    head: ExitHead
    router: MlpRouter


def exits_to_train(candidates: Sequence[int], kinds: Sequence[str], num_layers: int) -> list[Exit]:
    """Every head at every candidate before which it leaves out at least one layer.

    Raises ParamsError when a head is longer than the model leaves room for anywhere.
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
    """Layers run at every state that the heads read, and at the final one."""
    tails = {num_layers - parse_kind(kind)[1] for _, kind in exits}
    return sorted({layer for layer, _ in exits} | tails | {num_layers})


def train_exits(
    model: FrozenModel, capture: Capture, exits: Sequence[Exit], config: CalibrationConfig, progress: ExportProgress
) -> dict[Exit, TrainedExit]:
    """Train all of ``exits`` on the train split: one chain of heads per kind, then all the routers."""
    rank = min(config.rank, model.hidden_size)
    heads = {(layer, kind): make_head(kind, model, layer, rank, config.seed) for layer, kind in exits}
    kinds = sorted({kind for _, kind in exits}, key=lambda kind: -parse_kind(kind)[1])  # the longest work first
    chains = [[heads[exit] for exit in sorted(exits, reverse=True) if exit[1] == kind] for kind in kinds]
    for kind, line in zip(
        kinds, in_parallel([partial(_train_chain, chain, capture, config.seed) for chain in chains]), strict=True
    ):
        progress.note(f"{kind}: {line}")
    training = RouterTraining(cast(Label, config.label), _ROUTER_WINDOWS, _ROUTER_HELD_OUT, seed=config.seed)
    routers = in_parallel([partial(_train_router, heads[exit], capture, training) for exit in exits])
    return {exit: TrainedExit(heads[exit], router) for exit, router in zip(exits, routers, strict=True)}


def _train_chain(heads: Sequence[ExitHead], capture: Capture, seed: int, check: Check) -> str:
    """Train heads of one kind, deepest first, each from where the one before it ended; returns their agreement in words.

    Neighbouring layers need nearly the same translation: from a neighbour's, 48 steps end where 160 from nothing do
    (demo model stock after layer 8, agreement on 16 held-out windows: linear 40.6% against 40.5%, tail:2 60.2% against 60.3%).
    """
    said = []
    for before, head in zip([None, *heads[:-1]], heads, strict=True):
        if before is not None:
            for parameter, start in zip(head.trained(), before.trained(), strict=True):
                parameter.data.copy_(start)
        steps = HeadTraining().steps if before is None else _STEPS_FROM_NEIGHBOUR
        _, history = train_head(head, capture, HeadTraining(steps=steps, check_every=_CHECK_EVERY, seed=seed), check)
        best = min(history, key=lambda progress: progress.divergence)
        said.append(f"{best.agreement:.1%} after layer {head.checkpoint}")
    return ", ".join(reversed(said))


def _train_router(head: ExitHead, capture: Capture, training: RouterTraining, check: Check) -> MlpRouter:
    check()
    return train_router(head, capture, training)


def trace_exits(
    model: FrozenModel,
    capture: Capture,
    split: SplitName,
    exits: Mapping[Exit, TrainedExit],
    max_windows: int | None = None,
) -> SplitTrace:
    """What ``exits`` say about the tokens of ``split``, of at most ``max_windows`` windows; one job per checkpoint."""
    checkpoints = sorted({layer for layer, _ in exits})
    groups = [{key: one for key, one in exits.items() if key[0] == layer} for layer in checkpoints]
    lm_head = model.lm_head  # made here: jobs share it

    def job(group: Mapping[Exit, TrainedExit], check: Check) -> SplitTrace:
        check()
        heads = {key: one.head for key, one in group.items()}
        routers = {key: (*TRAINING_FREE, one.router) for key, one in group.items()}
        return trace_split(capture, split, lm_head, heads, routers, max_windows)

    parts = list(in_parallel([partial(job, group) for group in groups]))
    traced = {key: trace for part in parts for key, trace in part.exits.items()}
    return replace(parts[0], exits={key: traced[key] for key in exits})
