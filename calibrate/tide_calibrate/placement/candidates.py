"""Candidate exits: of every head and router at every checkpoint, the one with the best expected speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import ROUTERS, CostTable, ExitInfo
from tide_runtime.errors import CalibrationError

from tide_calibrate.certificate.risk import ExitRule, fit_family, policy_counts
from tide_calibrate.kinds import check_router, package_fields
from tide_calibrate.placement.expected_speed import exact_speedups, exit_speedup
from tide_calibrate.traces.trace import ExitTrace, SplitTrace

EXACT = "exact:router"  # policy `exact` with drafts from exits alone
MAX_CANDIDATES = 3  # exits whose speed is measured
WORTH = 1.01  # gain that a second threshold must have; a smaller one is noise on so few tokens
THRESHOLD_SHARES = tuple(np.arange(0.05, 0.96, 0.05).tolist())  # shares of tokens that go on to deeper layers
MLP_SHARES = (0.1, 0.3)  # shares of tokens for which the head is not evaluated, one for each threshold


@dataclass(frozen=True)
class Candidate:
    """An exit alone in the model.

    Args:
        info: with thresholds for both policies; ``exit_threshold`` is not certified.
        draft_limit: the best for policy ``exact``.
        speedups: policy (`EXACT`, ``exit``) → expected speed over the uncut model's; 0 for ``exit`` without a threshold.
    """

    info: ExitInfo
    draft_limit: int
    speedups: dict[str, float]


def best_candidates(
    trace: SplitTrace, costs: CostTable, router: str = "auto", policy: str = EXACT, max_disagreement: float = 0.01
) -> list[Candidate]:
    """The fastest exits by ``policy``, fastest first, at most `MAX_CANDIDATES` and one for each head at a checkpoint.

    Args:
        trace: text like the text to be generated, ideally the model's own greedy output.
        costs: step costs of the target machine, for one sequence.
        router: one kind, or ``auto`` for every kind whose scores were recorded.
        policy: `EXACT` or ``exit``.
        max_disagreement: ε of policy ``exit``.

    Raises CalibrationError when the table lacks sizes, the trace has no tokens, or no exit has scores of the router; ParamsError
    for an unknown router.
    """
    check_router(router)
    best = dict[tuple[int, str], Candidate]()
    for candidate in _of_each_kind(trace, costs, router, max_disagreement):
        key = candidate.info.checkpoint, candidate.info.head
        if key not in best or _worth(candidate, policy) > _worth(best[key], policy):
            best[key] = candidate
    if not best:
        known = sorted({name for traced in trace.exits.values() for name in traced.scores})
        raise CalibrationError(f"there are no scores of the router {router}; scored: {', '.join(known) or 'nothing'}")
    return sorted(best.values(), key=lambda candidate: -_worth(candidate, policy))[:MAX_CANDIDATES]


def _worth(candidate: Candidate, policy: str) -> float:
    return candidate.speedups[policy] / (1.0 if candidate.info.mlp_threshold is None else WORTH)


def _of_each_kind(trace: SplitTrace, costs: CostTable, router: str, max_disagreement: float) -> Iterator[Candidate]:
    """Yield one candidate for each checkpoint, head, router and MLP threshold: the one whose threshold is best for `EXACT`."""
    for traced in trace.exits.values():
        for kind in ROUTERS if router == "auto" else (router,):
            for mlp_threshold in _mlp_thresholds(traced, kind):
                fields = package_fields(traced.head, kind)
                info = ExitInfo(traced.checkpoint, traced.head, kind, 0.0, mlp_threshold=mlp_threshold, **fields)
                if info.checkpoint < trace.num_layers - info.tail_layers:
                    yield _candidate(trace, costs, info, max_disagreement)


def _mlp_thresholds(traced: ExitTrace, kind: str) -> list[float | None]:
    """Thresholds of an MLP before the head's probability; [None] for other kinds, [] where scores are missing."""
    names = kind.split("+")
    if not set(names) <= set(traced.scores):
        return []
    return [*score_thresholds(traced.scores["mlp"], MLP_SHARES)[1:]] if len(names) > 1 else [None]


def score_thresholds(scores: NDArray[np.float32], shares: Iterable[float]) -> list[float]:
    """Thresholds that about these shares of the tokens stay below, and 0; ascending, rounded to three digits."""
    finite = scores[np.isfinite(scores)]
    quantiles = np.quantile(finite, list(shares)).tolist() if len(finite) else []
    return sorted({0.0, *(round(min(max(value, 0.0), 1.0), 3) for value in quantiles)})


def _candidate(trace: SplitTrace, costs: CostTable, info: ExitInfo, max_disagreement: float) -> Candidate:
    scores = trace.exits[info.checkpoint, info.head].scores[info.router.split("+")[-1]]
    options = [replace(info, exact_threshold=threshold) for threshold in score_thresholds(scores, THRESHOLD_SHARES)]
    speedups = np.array([exact_speedups(trace, option, costs) for option in options])
    chosen, drafts = np.unravel_index(int(speedups.argmax()), speedups.shape)
    info = replace(options[chosen], exit_threshold=boldest_threshold(trace, info, max_disagreement))
    of_exit = exit_speedup(trace, [info], costs) if info.exit_threshold is not None else 0.0
    return Candidate(info, int(drafts) + 1, {EXACT: float(speedups[chosen, drafts]), "exit": of_exit})


def boldest_threshold(trace: SplitTrace, info: ExitInfo, max_disagreement: float) -> float | None:
    """The boldest ``exit_threshold`` that changes at most ``max_disagreement`` of the tokens of ``trace``, or None.

    It ranks candidates before thresholds are certified, and guarantees nothing.
    """
    family = fit_family(trace, [ExitRule.from_info(info)])
    counts = policy_counts(trace, family.exits, family.thresholds, np.zeros(len(trace.window), np.intp))
    allowed = np.flatnonzero(counts.rates()[0] <= max_disagreement)
    threshold = float(family.thresholds[allowed[-1], 0]) if len(allowed) else np.inf
    return min(threshold, 1.0) if np.isfinite(threshold) else None
