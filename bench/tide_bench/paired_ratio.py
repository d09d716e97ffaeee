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
