"""Threshold vectors ordered from safest to boldest: one knob for all checkpoints.

The knob is the share of wrong exits that each checkpoint tolerates. What a score says about that share is learned on one part of
the data (the training split), so that on another the order in which thresholds are tested is already fixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tide_calibrate.certificate.risk import ExitRule, ordered
from tide_calibrate.traces.trace import SplitTrace

SAFEST, BOLDEST = 1e-4, 0.5  # an exit that is wrong more often than right is none


@dataclass(frozen=True)
class ThresholdFamily:
    """M threshold vectors over K exits.

    Args:
        exits: shallow first.
        wrong: [M], the share of wrong exits that a member tolerates at each checkpoint; the first is 0: nobody exits.
        thresholds: [M, K] float64, exact in float32 (scores are float32), columns non-increasing; inf: nobody exits there.
    """

    exits: tuple[ExitRule, ...]
    wrong: NDArray[np.float64]
    thresholds: NDArray[np.float64]


def fit_family(trace: SplitTrace, exits: Sequence[tuple], members: int = 256) -> ThresholdFamily:
    """A family for ``exits`` (checkpoint, head, router[, mlp_threshold]), from what their scores meant on ``trace``.

    At each checkpoint the threshold is the lowest score above which at most the tolerated share of tokens disagreed.
    """
    rules = ordered(exits)
    wrong = np.concatenate([[0.0], np.geomspace(SAFEST, BOLDEST, members - 1)])
    columns = [_lowest_scores(rule.scores(trace), rule.trace(trace).agrees, wrong) for rule in rules]
    return ThresholdFamily(rules, wrong, np.stack(columns, axis=1))


def _lowest_scores(scores: NDArray[np.float32], agrees: NDArray[np.bool_], wrong: NDArray[np.float64]) -> NDArray[np.float64]:
    """[M], for each tolerated share the lowest score s such that tokens of score >= s are wrong no more often than that."""
    finite = np.isfinite(scores)
    order = np.argsort(-scores[finite], kind="stable")
    ranked = scores[finite][order].astype(np.float64)
    # One error more than seen: without it a single lucky token would look like a safe region.
    rate = (np.cumsum(~agrees[finite][order]) + 1) / (np.arange(len(ranked)) + 2)
    rate[:-1][ranked[:-1] == ranked[1:]] = math.inf  # equal scores exit together
    lowest_from_here = np.minimum.accumulate(rate[::-1])[::-1]
    last = np.searchsorted(lowest_from_here, wrong, side="right") - 1
    return np.where(last >= 0, ranked[np.maximum(last, 0)], math.inf) if len(ranked) else np.full(len(wrong), math.inf)
