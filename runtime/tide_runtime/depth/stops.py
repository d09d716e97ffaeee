"""Where policy ``exit`` stops: exits with their thresholds, the model's own rule, and depth budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tide_runtime.bundle.exits import Exit, bundle_exits
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.options import DepthOptions, gate_threshold, no_exit, too_deep
from tide_runtime.errors import ParamsError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence

ANY_SCORE = -1.0  # a threshold that every score reaches, except NaN


@dataclass(frozen=True)
class Stop:
    """An exit that may be taken, and the least score for it; of the model's own rule the least sum of probabilities."""

    exit: Exit
    threshold: float


def stops_of(manifest: Manifest, options: DepthOptions) -> list[Stop]:
    """The exits that may be taken, shallow first. Raises ParamsError where there is none."""
    gate = gate_threshold(manifest, options) if adds_up(options) else options.threshold
    exits = bundle_exits(manifest)
    stops = [Stop(e, t) for e in exits if (t := e.info.exit_threshold if gate is None else gate) is not None]
    kept = [stop for stop in stops if stop.exit.info.checkpoint >= options.min_depth]
    if not kept:
        raise ParamsError(too_deep(stops[-1].exit.info.checkpoint, options) if stops else no_exit(manifest))
    return kept


def check_budget(params: GenerationParams, stops: Sequence[Stop], options: DepthOptions, num_layers: int) -> None:
    """Raise ParamsError where a request's depth budget is below what a text takes at least: the first exit's layers, and all of
    them where ``max_exit_streak`` forces it."""
    budget = params.depth_budget
    streak = options.max_exit_streak
    shallow = stops[0].exit.layers
    least = (streak * shallow + num_layers) / (streak + 1) if streak else shallow
    if budget is not None and budget < least:
        then = f" and max_exit_streak {streak} sends one token in {streak + 1} through all {num_layers}" if streak else ""
        raise ParamsError(
            f"depth_budget is {budget} layers, the first exit comes after {shallow}{then}; set it to at least {least:g}"
        )


def is_over_budget(sequence: TokenSequence, num_layers: int) -> bool:
    """Whether a full-depth token would take more layers per token than the request may."""
    budget = sequence.params.depth_budget
    depths = sequence.depth.token_depths
    return budget is not None and sum(depths) + num_layers > budget * (len(depths) + 1)


def adds_up(options: DepthOptions) -> bool:
    """Whether tokens stop by the model's own rule."""
    return options.exit_rule == "model"


def least_of_sum(stop: Stop, staying: float) -> float:
    """The gate's probability from which on a token stops by the model's own rule; ``staying``: that it left no loop before.

    In Ouro (arXiv:2510.25741) the gate leaves loop r with the probability λ_r · Π(1 - λ_j) over the loops j before. The token
    stops where these add up to the threshold: where 1 - (1 - λ_r) · Π(1 - λ_j) reaches it.
    """
    return 1 - (1 - stop.threshold) / staying if staying else 0.0
