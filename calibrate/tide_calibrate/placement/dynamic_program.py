r"""Choose a chain of exits by dynamic programming over a cost that depends on neighbouring exits only.

A token that passes option p (its score is below the threshold) goes on to a deeper option o, or to the last layer. With the
rates of the trace,

    V(p) = min( run(p, L) + head,  min over o deeper than p of
                run(p, o) + evaluation(o) + P(wrong at o | passed p) * wrong_ms + P(passed o | passed p) * V(o) )

    run(p, o) = launch + (c_o - c_p) * (layer_1 - extra), for o = L plus the host time of a verification pass

where ``extra`` is the additional time of a layer per further token in its batch. Tokens that stop early run the remaining layers
later, batched with those that pass, so a launch is paid per token that passes, and ``extra`` per token and layer wherever the
token stops. The latter is a constant except for the layers before the first option, which every token runs alone:

    run(0, o) = warm * (launch + c_o * layer_1) + (L - c_o) * extra

where ``warm`` is the mean relative time of a prefix among consecutive early stops (`costs.cache_warmth`).

``wrong_ms`` is the price of a wrong stop: for policy ``exact`` the work wasted on the drafts after it, which depends on the whole
cycle, so the caller tries several prices and compares the results by simulation. Conditioning the rates on the last passed option
only (a first-order Markov assumption) makes the cost depend on neighbours; it is exact for one checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tide_runtime.costs.cost_model import StepCurve

from tide_calibrate.placement.candidates import ExitOption


@dataclass(frozen=True)
class ChainCosts:
    """Costs between neighbouring options in ms per token; row 0 is the start of the model, row i + 1 is option i.

    Args:
        step: [O + 1, O], from passing the row's option to having evaluated the column's; inf where it is not deeper.
        passed: [O + 1, O], share of tokens that pass the column's option among those that passed the row's.
        end: [O + 1], from passing the row's option to the end of the model.
    """

    step: NDArray[np.float64]
    passed: NDArray[np.float64]
    end: NDArray[np.float64]


@dataclass(frozen=True)
class Chain:
    """Indices of options, shallow first, and their modelled ms per token."""

    ms: float
    options: tuple[int, ...]


def chain_costs(options: Sequence[ExitOption], num_layers: int, times: StepCurve, wrong_ms: float) -> ChainCosts:
    """Compute the costs of the module docstring with the rates of the options' trace."""
    places = np.array([option.checkpoint for option in options])
    passes = np.stack([~option.decisions.confident for option in options]).astype(np.float32)
    wrong = np.stack([option.decisions.confident & ~option.decisions.agrees for option in options]).astype(np.float32)
    before = np.concatenate([np.ones_like(passes[:1]), passes])
    reached = np.maximum(before.sum(1, keepdims=True), 1)  # avoids 0 / 0 where no token passes
    fixed = float(times.layer_ms[1]) - times.extra_token
    warm = np.array([times.table.warm_shares(place, num_layers).mean() for place in places.tolist()])
    start = (times.launch_ms[1] + places * times.layer_ms[1]) * warm + (num_layers - places) * times.extra_token
    step = np.concatenate([start[None], times.launch_ms[1] + (places[None] - places[:, None]) * fixed])
    step = step + [option.evaluation_ms for option in options] + (before @ wrong.T) / reached * wrong_ms
    step[1:][places[None] <= places[:, None]] = np.inf
    whole = float(times.launch_ms[1] + num_layers * times.layer_ms[1])
    end = (
        np.concatenate([[whole], times.launch_ms[1] + (num_layers - places) * fixed])
        + times.logits_ms[1]
        + times.verification_host_ms
    )
    return ChainCosts(step, (before @ passes.T) / reached, end)


def best_chains(costs: ChainCosts, most_exits: int) -> list[Chain]:
    """The best chain that begins with each option, cheapest first; at most ``most_exits`` options per chain."""
    size = costs.step.shape[1]
    value, tails = costs.end[1:].copy(), [()] * size  # type: tuple[NDArray[np.float64], list[tuple[int, ...]]]
    for _ in range(most_exits - 1):
        onward = costs.step[1:] + costs.passed[1:] * value
        best = onward.argmin(axis=1)
        cheaper = onward[np.arange(size), best] < costs.end[1:]
        tails = [(int(o), *tails[o]) if better else () for o, better in zip(best, cheaper, strict=True)]
        value = np.where(cheaper, onward[np.arange(size), best], costs.end[1:])
    first = costs.step[0] + costs.passed[0] * value
    return [Chain(float(first[o]), (int(o), *tails[o])) for o in np.argsort(first, kind="stable")]
