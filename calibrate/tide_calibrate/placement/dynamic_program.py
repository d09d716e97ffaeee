r"""Which checkpoints to put behind one another: dynamic programming over a cost that depends on neighbours only.

A token that passes option p (its router said no) goes on to a deeper option o, or to the end. With the rates of the trace,

    V(p) = min( carry(p, L) + head,  min over o deeper than p of
                carry(p, o) + ask(o) + P(wrong at o | passed p) * wrong_ms + P(passed o | passed p) * V(o) )

    carry(p, o) = launch + (c_o - c_p) * (layer_1 - extra), to the end with what the runtime's loop takes for a deep pass

where ``extra`` is what a layer takes longer per token more in its batch. Tokens that stop early are run later with those
that pass, so a launch is paid per token that passes and ``extra`` per token and layer, wherever it stops: a constant, but for
the layers before the first option, which each token runs alone: carry(0, o) = warm * (launch + c_o * layer_1) + (L - c_o) * extra
where ``warm`` is the mean share of its time that a prefix takes when tokens stop there again and again.

``wrong_ms`` is the price of a wrong stop: for policy ``exact`` the work done on drafts after it, which only the whole cycle
tells, so the caller tries several and lets the simulation judge. Taking the rates as conditional on the last option passed
alone (first-order Markov) is what makes the problem one of neighbours; it is exact for one checkpoint.
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
    """What neighbours cost each other, in ms per token; row 0 is the start of the model, row i + 1 is option i.

    Args:
        step: [O + 1, O], from passing the row's option to having asked the column's; inf where it is not deeper.
        passed: [O + 1, O], share that passes the column's option among those that passed the row's.
        end: [O + 1], from passing the row's option to the end of the model.
    """

    step: NDArray[np.float64]
    passed: NDArray[np.float64]
    end: NDArray[np.float64]


@dataclass(frozen=True)
class Chain:
    """Options one after another, by index, and their modelled ms per token."""

    ms: float
    options: tuple[int, ...]


def chain_costs(options: Sequence[ExitOption], num_layers: int, times: StepCurve, wrong_ms: float) -> ChainCosts:
    """The costs above, with the rates of the options' trace."""
    places = np.array([option.checkpoint for option in options])
    passes = np.stack([~option.decisions.confident for option in options]).astype(np.float32)
    wrong = np.stack([option.decisions.confident & ~option.decisions.agrees for option in options]).astype(np.float32)
    before = np.concatenate([np.ones_like(passes[:1]), passes])
    reached = np.maximum(before.sum(1, keepdims=True), 1)  # where nobody passes, nothing is reached
    fixed = float(times.layer_ms[1]) - times.extra_token
    warm = np.array([times.table.warm_shares(place, num_layers).mean() for place in places.tolist()])
    start = (times.launch_ms[1] + places * times.layer_ms[1]) * warm + (num_layers - places) * times.extra_token
    step = np.concatenate([start[None], times.launch_ms[1] + (places[None] - places[:, None]) * fixed])
    step = step + [option.ask_ms for option in options] + (before @ wrong.T) / reached * wrong_ms
    step[1:][places[None] <= places[:, None]] = np.inf
    whole = float(times.launch_ms[1] + num_layers * times.layer_ms[1])
    end = (
        np.concatenate([[whole], times.launch_ms[1] + (num_layers - places) * fixed])
        + times.logits_ms[1]
        + times.verification_host_ms
    )
    return ChainCosts(step, (before @ passes.T) / reached, end)


def best_chains(costs: ChainCosts, most_exits: int) -> list[Chain]:
    """The best chain that begins with each option, cheapest first; at most ``most_exits`` options long."""
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
