"""Ratios of paired times, and how far two texts agree, on figures whose right values are known."""

from __future__ import annotations

import numpy as np
import pytest
from tide_bench.output_checks import disagreement_rate, first_difference, identical_share
from tide_bench.paired_ratio import paired_ratio


def test_ratio_is_the_median_of_pairs_and_of_the_total() -> None:
    """A slow moment of the machine would decide the ratio, or the interval would not hold it."""
    ratio = paired_ratio([2, 2, 2, 2, 20], [1, 1, 1, 1, 1])
    assert ratio.median == 2 and ratio.total == pytest.approx(28 / 5)
    assert ratio.low <= ratio.median <= ratio.high
    assert paired_ratio([3, 3], [2, 2]).low == paired_ratio([3, 3], [2, 2]).high == 1.5


def test_interval_narrows_with_more_pairs() -> None:
    """The interval would not show how certain the ratio is."""
    times = np.random.default_rng(1).lognormal(sigma=0.2, size=400).tolist()
    few, many = paired_ratio(times[:16], [1.0] * 16), paired_ratio(times, [1.0] * 400)
    assert many.high - many.low < few.high - few.low


def test_unpaired_times_are_refused() -> None:
    """Different prompts would be compared."""
    with pytest.raises(ValueError, match="pairs"):
        paired_ratio([1, 2], [1])


def test_disagreement_counts_until_the_first_difference() -> None:
    """One wrong token would be counted again for everything that follows from it."""
    reference = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    rows = [[0, 1, 9, 9, 9], [0, 1, 2, 3, 4]]
    assert disagreement_rate(rows, reference) == pytest.approx(1 / (2 + 4))
    assert identical_share(rows, reference) == pytest.approx(0.7)
    assert disagreement_rate(reference, reference) == 0
    assert first_difference([1, 2], [1, 2, 3]) is None
