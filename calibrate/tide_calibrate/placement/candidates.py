"""Candidate exits for placement: every head, router and threshold at every checkpoint, with their decisions on a trace.

`exit_speedup` estimates policy ``exit`` before thresholds are certified; it ranks candidates and makes no guarantee.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import ROUTERS, CostTable, ExitInfo
from tide_runtime.errors import CalibrationError

from tide_calibrate.certificate.risk import ExitRule, fit_family, policy_counts
from tide_calibrate.simulation.exit import simulate_exit
from tide_calibrate.simulation.replay import cut_model, decide
from tide_calibrate.traces.trace import ExitTrace, SplitTrace

THRESHOLD_SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)  # of the tokens that go on to deeper layers
MLP_SHARES = (0.1, 0.3)  # of the tokens for which the head is not evaluated


_BATCH = 8  # tokens of a verification, for the price of a further one


@dataclass(frozen=True)
class ExitOption:
    """An exit alone in the model, with the figures of policy ``exact`` on a trace.

    Args:
        ms: mean ms of a token, without what wrong drafts waste.
        wrong: share of the tokens that stop here with another token than the full model's.
    """

    info: ExitInfo
    ms: float
    wrong: float


def exit_options(trace: SplitTrace, costs: CostTable, router: str = "auto") -> list[ExitOption]:
    """All options on ``trace``, shallow first. ``router``: one kind, or ``auto`` for every kind whose scores were recorded.

    Raises CalibrationError when no exit has scores of the router.
    """
    known = sorted({name for traced in trace.exits.values() for name in traced.scores})
    if not any(set(kind.split("+")) <= set(known) for kind in _kinds(router)):
        raise CalibrationError(f"there are no scores of the router {router}; scored: {', '.join(known) or 'nothing'}")
    options = []
    for checkpoint, head in sorted(trace.exits):
        for info in _exit_infos(trace.exits[checkpoint, head], router):
            if checkpoint < trace.num_layers - info.tail_layers:
                options.append(_option(trace, info, costs))
    return options


def score_thresholds(scores: NDArray[np.float32], shares: Iterable[float]) -> list[float]:
    """Thresholds that about these shares of the tokens stay below, and 0; ascending, rounded to three digits."""
    finite = scores[np.isfinite(scores)]
    found = np.quantile(finite, list(shares)).tolist() if len(finite) else []
    return sorted({0.0, *(round(min(max(value, 0.0), 1.0), 3) for value in found)})


def exit_speedup(trace: SplitTrace, exits: Sequence[ExitInfo], costs: CostTable, max_disagreement: float) -> float:
    """Speedup of policy ``exit`` with the boldest thresholds that change at most ``max_disagreement`` of the tokens of ``trace``.

    Returns 1 when no thresholds satisfy that.
    """
    family = fit_family(trace, [ExitRule.from_info(info) for info in exits])
    counts = policy_counts(trace, family.exits, family.thresholds, np.zeros(len(trace.window), np.intp))
    allowed = np.flatnonzero(counts.rates()[0] <= max_disagreement)
    thresholds = family.thresholds[allowed[-1]] if len(allowed) else np.full(len(exits), np.inf)
    if not np.isfinite(thresholds).any():
        return 1.0
    with_thresholds = [replace(info, exit_threshold=min(float(t), 1.0)) for info, t in zip(exits, thresholds, strict=True)]
    return simulate_exit(trace, with_thresholds, costs).speedup


def _kinds(router: str) -> tuple[str, ...]:
    return ROUTERS if router == "auto" else (router,)


def _exit_infos(traced: ExitTrace, router: str) -> Iterator[ExitInfo]:
    for kind in _kinds(router):
        scores = kind.split("+")
        if not set(scores) <= set(traced.scores):
            continue
        mlp_thresholds = score_thresholds(traced.scores["mlp"], MLP_SHARES)[1:] if len(scores) > 1 else [None]
        for threshold in score_thresholds(traced.scores[scores[-1]], THRESHOLD_SHARES):
            for mlp_threshold in mlp_thresholds:
                yield ExitInfo(traced.checkpoint, traced.head, kind, threshold, mlp_threshold=mlp_threshold)


def _option(trace: SplitTrace, info: ExitInfo, costs: CostTable) -> ExitOption:
    """Tokens that stop wait for one that goes on, and run the remaining layers with it as further tokens of its batch."""
    decisions = decide(trace, info, info.exact_threshold)
    model, (early_exit,) = cut_model([info], trace.num_layers, costs)
    with_head, without = (model.evaluation(1, 0, early_exit, head) for head in (True, False))
    evaluation = without + float(decisions.runs_head.mean()) * (with_head - without)
    one, many = (model.price(model.finish(early_exit.boundary, tokens=tokens)) for tokens in (1, _BATCH))
    further = max(0.0, many - one) / (_BATCH - 1)
    goes_on = 1 - float(decisions.confident.mean())
    wrong = float(np.mean(decisions.confident & ~decisions.agrees))
    return ExitOption(info, evaluation + further + goes_on * (one - further), wrong)
