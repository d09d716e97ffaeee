"""How much faster one arm is than another, from runs on the same prompts one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 2000


@dataclass(frozen=True)
class PairedRatio:
    """Above 1: faster than the baseline.

    Args:
        median: of the ratios of pairs, which a slow moment of the machine does not move.
        low, high: its 95% interval.
        total: of the summed times; long runs weigh more.
    """

    median: float
    low: float
    high: float
    total: float


def paired_ratio(baseline_s: Sequence[float], arm_s: Sequence[float]) -> PairedRatio:
    """Speed of an arm over the baseline's, from the seconds of both on the same work, pair by pair.

    The interval is the percentile bootstrap over pairs (Efron & Tibshirani 1993, chapter 13), seeded.
    """
    baseline, arm = np.asarray(baseline_s, float), np.asarray(arm_s, float)
    if baseline.shape != arm.shape or baseline.size == 0:
        raise ValueError(f"{baseline.size} times of the baseline and {arm.size} of the arm; give pairs")
    ratios = baseline / arm
    drawn = np.random.default_rng(0).integers(0, ratios.size, (_RESAMPLES, ratios.size))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), (2.5, 97.5))
    return PairedRatio(float(np.median(ratios)), float(low), float(high), float(baseline.sum() / arm.sum()))


def chained_ratio(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> PairedRatio:
    """Speed of an arm over a baseline with which it was never timed, by way of a third one that was timed with both.

    Args:
        one: (third's seconds, arm's seconds) on the same work, pair by pair.
        other: (third's seconds, baseline's seconds), on other turns.

    The interval resamples both (Efron & Tibshirani 1993, chapter 8: two-sample problems).
    """
    arm, baseline = np.asarray(one, float), np.asarray(other, float)
    if not arm.size or not baseline.size:
        raise ValueError("no turns of the arm or the baseline with the third one; give pairs")
    random = np.random.default_rng(0)
    medians = []
    for pairs in (arm, baseline):
        ratios = pairs[:, 0] / pairs[:, 1]
        medians.append(np.median(ratios[random.integers(0, len(ratios), (_RESAMPLES, len(ratios)))], axis=1))
    low, high = np.percentile(medians[0] / medians[1], (2.5, 97.5))
    median = np.median(arm[:, 0] / arm[:, 1]) / np.median(baseline[:, 0] / baseline[:, 1])
    total = (arm[:, 0].sum() / arm[:, 1].sum()) / (baseline[:, 0].sum() / baseline[:, 1].sum())
    return PairedRatio(float(median), float(low), float(high), float(total))
