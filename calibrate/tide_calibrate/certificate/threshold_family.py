"""A one-parameter family of threshold vectors, ordered from safest to boldest.

The parameter is the share of wrong exits that each checkpoint tolerates. The thresholds for it are fitted on the training split,
so that the order in which they are tested on the threshold split is fixed beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tide_calibrate.certificate.risk import ExitRule, ordered
from tide_calibrate.traces.trace import SplitTrace

SAFEST, BOLDEST = 1e-4, 0.5  # tolerated share of wrong exits; an exit that is wrong more often than right is useless


@dataclass(frozen=True)
class ThresholdFamily:
    """M threshold vectors over K exits.

    Args:
        exits: shallow first.
        wrong: [M], the share of wrong exits that a member tolerates at each checkpoint; 0 for the first, which never exits.
        thresholds: [M, K] float64, exact in float32 (scores are float32), columns non-increasing; inf where no token exits.
    """

    exits: tuple[ExitRule, ...]
    wrong: NDArray[np.float64]
    thresholds: NDArray[np.float64]


def fit_family(trace: SplitTrace, exits: Sequence[tuple], members: int = 256) -> ThresholdFamily:
    """Fit a family for ``exits`` (checkpoint, head, router[, mlp_threshold]) on ``trace``.

    At each checkpoint the threshold is the lowest score above which at most the tolerated share of tokens disagreed.
    """
    rules = ordered(exits)
    wrong = np.concatenate([[0.0], np.geomspace(SAFEST, BOLDEST, members - 1)])
    columns = [_lowest_scores(rule.scores(trace), rule.trace(trace).agrees, wrong) for rule in rules]
    return ThresholdFamily(rules, wrong, np.stack(columns, axis=1))


def _lowest_scores(scores: NDArray[np.float32], agrees: NDArray[np.bool_], wrong: NDArray[np.float64]) -> NDArray[np.float64]:
    """The lowest score s for each tolerated share, [M], such that at most this share of the tokens of score >= s is wrong."""
    finite = np.isfinite(scores)
    order = np.argsort(-scores[finite], kind="stable")
    ranked = scores[finite][order].astype(np.float64)
    # Laplace smoothing: without it a single right token would count as an error-free region.
    rate = (np.cumsum(~agrees[finite][order]) + 1) / (np.arange(len(ranked)) + 2)
    rate[:-1][ranked[:-1] == ranked[1:]] = math.inf  # equal scores exit together
    lowest_from_here = np.minimum.accumulate(rate[::-1])[::-1]
    last = np.searchsorted(lowest_from_here, wrong, side="right") - 1
    return np.where(last >= 0, ranked[np.maximum(last, 0)], math.inf) if len(ranked) else np.full(len(wrong), math.inf)
