"""Train a head and a router at every candidate exit, as much as there is time for, and write the chosen ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import ExitInfo

from tide_calibrate.capture.store import Capture
from tide_calibrate.config import CalibrationConfig
from tide_calibrate.draft_head.head import DraftHead
from tide_calibrate.exit_heads import ExitHead, make_head, parse_kind
from tide_calibrate.exit_heads.sampled_vocabulary import SampledVocabulary
from tide_calibrate.exit_heads.train import HeadTraining, step_seconds, train_head
from tide_calibrate.kinds import OWN_ROUTERS
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.parallel import Check, in_parallel, workers_on
from tide_calibrate.routers import MlpRouter, Router
from tide_calibrate.routers.train import RouterTraining, package_router, train_router
from tide_calibrate.traces.trace import Exit
from tide_calibrate.training_plan import TrainingPlan, plan_training
from tide_export.calibration.exits_file import Arrays, write_exit_tensors
from tide_export.config import loop_ends
from tide_export.graphs.exit_gate import gate_router
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

_CHECK_EVERY = 24
# Two thirds of RouterTraining's default, because a router is trained for every exit. On the demo model stock this costs 0.003
# (tail:2) to 0.015 (linear) of the area under the agreement–coverage curve.
_ROUTER_WINDOWS, _ROUTER_HELD_OUT = 64, 16


@dataclass(frozen=True)
class TrainedExit:
    """An exit head and the MLP router trained for it.

    Args:
        gate: the model's own router, at the end of a loop.
        package: the router of a package, where the options name one.
    """

    head: ExitHead
    router: MlpRouter
    gate: MlpRouter | None = None
    package: Router | None = None

    @property
    def routers(self) -> dict[str, Router]:
        """Name of the scores → router."""
        return {router.kind: router for router in (self.router, self.gate, self.package) if router is not None}

    def router_of(self, info: ExitInfo) -> Router:
        """The router whose weights the exit ``info`` needs."""
        return self.routers.get(info.router, self.router)


def with_gates(exits: Mapping[Exit, TrainedExit], loaded: LoadedModel) -> dict[Exit, TrainedExit]:
    """``exits`` with the model's own exit gate as a further router at the ends of its loops, if it has one."""
    tensors = gate_router(loaded)
    if tensors is None:
        return dict(exits)
    gate = MlpRouter(tensors["down"].shape[1], len(tensors["up"]), kind="gate").requires_grad_(False)
    gate.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()})
    gate.to(loaded.model.device)
    ends = loop_ends(loaded.num_layers, loaded.loops)
    return {key: replace(one, gate=gate) if key[0] in ends else one for key, one in exits.items()}


def train_exits(
    model: FrozenModel,
    capture: Capture,
    exits: Sequence[Exit],
    config: CalibrationConfig,
    progress: ExportProgress,
    vocabulary: SampledVocabulary | None,
) -> dict[Exit, TrainedExit]:
    """Train heads of ``exits`` on the train split, then all their routers.

    Every kind is trained after its deepest candidate. Where ``config.minutes`` are too few for all of ``exits``, the kinds that
    agree best there are also trained after the others, and a note names those that are not.

    Args:
        vocabulary: the tokens whose logits are computed; None: all.

    Returns:
        The exits that were trained, in the order of ``exits``.
    """
    setting = _Setting(model, capture, config, vocabulary)
    plan = setting.plan(exits)
    progress.note(str(plan))
    heads = {key: setting.new_head(*key) for key in exits}
    chains = {kind: [heads[key] for key in sorted(exits, reverse=True) if key[1] == kind] for _, kind in exits}
    kinds = sorted(chains, key=lambda kind: -parse_kind(kind)[1])  # longest jobs first
    agreements = setting.train_deepest([chains[kind][0] for kind in kinds], plan, progress)
    ranking = sorted(kinds, key=lambda kind: _lead(kind, agreements[kind], model.num_layers), reverse=True)
    continued = plan.affordable(ranking)
    if dropped := [kind for kind in ranking if kind not in continued]:
        progress.note(f"no time for {', '.join(dropped)} after shallower candidates: give more --minutes")
    with progress.steps("train", plan.continued_work(continued)) as bar:
        going_on = [chains[kind] for kind in kinds if kind in continued and len(chains[kind]) > 1]
        for note in in_parallel([partial(setting.train_chain, chain, plan, bar.advance) for chain in going_on], plan.workers):
            progress.note(note)
        trained = [key for key in exits if key[1] in continued or heads[key] is chains[key[1]][0]]
        made = list(in_parallel([partial(setting.train_router, heads[key], plan, bar.advance) for key in trained], plan.workers))
    return dict(zip(trained, made, strict=True))


def _lead(kind: str, agreement: float, num_layers: int) -> float:
    """``agreement`` less the layers that the head runs, in passes: a draft pays if it agrees more often than it costs passes."""
    return agreement - parse_kind(kind)[1] / num_layers


@dataclass(frozen=True)
class _Setting:
    """What all heads are trained on."""

    model: FrozenModel
    capture: Capture
    config: CalibrationConfig
    vocabulary: SampledVocabulary | None

    def new_head(self, checkpoint: int, kind: str) -> ExitHead:
        rank = min(self.config.rank, self.model.hidden_size)
        return make_head(kind, self.model, checkpoint, rank, self.config.seed)

    def plan(self, exits: Sequence[Exit]) -> TrainingPlan:
        """Plan with step times that are measured on heads of their own, in as many threads as training uses."""
        heads = {kind: sum(kind == other for _, other in exits) for _, kind in exits}
        deepest = {kind: max(layer for layer, other in exits if kind == other) for kind in heads}
        workers = workers_on(self.model.device)
        measured = in_parallel([partial(self._step_seconds, layer, kind) for kind, layer in deepest.items()], workers)
        return plan_training(dict(zip(deepest, measured, strict=True)), heads, self.config.minutes, workers)

    def _step_seconds(self, checkpoint: int, kind: str, check: Check) -> float:
        check()
        # A head that has nothing to train, but a router, runs about as long.
        trained = kind if self.new_head(checkpoint, kind).trained() else "linear"
        training = HeadTraining(seed=self.config.seed)
        return step_seconds(self.new_head(checkpoint, trained), self.capture, training, self.vocabulary)

    def train_deepest(self, heads: Sequence[ExitHead], plan: TrainingPlan, progress: ExportProgress) -> dict[str, float]:
        """Train the deepest head of each kind; returns the agreement of each kind on held-out windows."""
        with progress.steps("train the deepest heads", sum(plan.deepest_seconds(head.kind) for head in heads)) as bar:
            found = in_parallel([partial(self._train_head, head, None, plan, bar.advance) for head in heads], plan.workers)
            agreements = {head.kind: agreement for head, agreement in zip(heads, found, strict=True)}
        summary = ", ".join(f"{head.kind} {agreements[head.kind]:.1%} after layer {head.checkpoint}" for head in heads)
        progress.note(f"agreement of the deepest heads: {summary}")
        return agreements

    def train_chain(self, heads: Sequence[ExitHead], plan: TrainingPlan, advance: Callable[[float], None], check: Check) -> str:
        """Train ``heads`` of one kind, deepest first, behind the first one, which is trained: each starts from the weights of its
        deeper neighbour.

        Neighbouring layers need nearly the same translator: 48 steps from a neighbour's reach what 160 steps from scratch do
        (demo model stock after layer 8, agreement on 16 held-out windows: linear 40.6% against 40.5%, tail:2 60.2% against
        60.3%).

        Returns:
            The agreement of every head as text, shallow first.
        """
        found = [self._train_head(*pair, plan, advance, check) for pair in zip(heads[1:], heads, strict=False)]
        shallow_first = reversed(list(zip(heads[1:], found, strict=True)))
        return f"{heads[0].kind}: " + ", ".join(f"{share:.1%} after layer {head.checkpoint}" for head, share in shallow_first)

    def _train_head(
        self, head: ExitHead, neighbour: ExitHead | None, plan: TrainingPlan, advance: Callable[[float], None], check: Check
    ) -> float:
        """Train ``head``, from the weights of its ``neighbour`` if there is one; returns its agreement on held-out windows."""
        seconds = plan.step_seconds[head.kind]

        def on_step() -> None:
            check()
            advance(seconds)

        if neighbour is not None:
            for parameter, start in zip(head.trained(), neighbour.trained(), strict=True):
                parameter.data.copy_(start)
        steps = plan.steps if neighbour is None else plan.steps_from_neighbour
        training = HeadTraining(steps=steps, check_every=min(_CHECK_EVERY, steps), seed=self.config.seed)
        _, history = train_head(head, self.capture, training, on_step, self.vocabulary)
        if head.trained():  # without an improvement for a while, training ends early
            advance((steps - history[-1].step) * seconds)
        return min(history, key=lambda progress: progress.divergence).agreement

    def train_router(self, head: ExitHead, plan: TrainingPlan, advance: Callable[[float], None], check: Check) -> TrainedExit:
        check()
        windows, held_out = (round(plan.router_share * count) for count in (_ROUTER_WINDOWS, _ROUTER_HELD_OUT))
        training = RouterTraining(windows, held_out, seed=self.config.seed)
        router = train_router(head, self.capture, training, self.vocabulary)
        package = None
        if self.config.router not in OWN_ROUTERS:
            package = package_router(self.config.router, head, self.capture, training, self.vocabulary)
        advance(plan.router_steps * plan.step_seconds[head.kind])
        return TrainedExit(head, router, package=package)


def write_exits(
    path: Path, heads: Mapping[int, ExitHead], routers: Mapping[int, Router], draft_head: DraftHead | None = None
) -> None:
    """Write the chosen head and router of each checkpoint, and the draft head if there is one, to exits.safetensors.

    Raises OutputError when ``path`` cannot be written.
    """
    tensors: dict[str, NDArray[Any]] = {}
    if draft_head is not None:
        tensors |= {f"draft.{name}": np.ascontiguousarray(array) for name, array in draft_head.tensors().items()}
    for checkpoint, head in heads.items():
        if head.translator is not None:
            tensors |= _prefixed_tensors(f"translator.{checkpoint}", head.translator)
    for checkpoint, router in routers.items():
        tensors |= _prefixed_tensors(f"router.{checkpoint}", router)
    write_exit_tensors(path, tensors)


def _prefixed_tensors(prefix: str, module: Any) -> Arrays:
    return {f"{prefix}.{name}": value.detach().float().contiguous().cpu().numpy() for name, value in module.state_dict().items()}
