"""What copied tokens are worth, counted on texts that are known."""

from __future__ import annotations

import numpy as np
from tide_calibrate.traces.trace import OwnText
from tide_runtime.depth_tuning import DepthTuning
from tide_runtime.drafting.text_drafter import TextPool

from benchmarks.text_drafts import hits_by_match, speedups

FLAT = np.array([0.0, *[10.0] * 13])  # ms of a pass by number of tokens
LOOP = OwnText(np.array([1, 2, 3] * 20), 6)
NOVEL = OwnText(np.arange(60), 6)


def test_hits_are_counted_by_the_length_of_the_match() -> None:
    """Breaks: rates of long matches would be those of short ones."""
    found = hits_by_match([LOOP, OwnText(np.array([5, 6, 5, 7]), 3)])
    assert found[1] == (0, 1)  # behind the second 5 came another token than behind the first
    assert found[24][0] == found[24][1] > 0


def test_repeating_text_is_faster_and_novel_text_is_not_slower() -> None:
    """Breaks: the modelled gain of drafts would be of other steps than the runtime takes."""
    fast, plain = speedups([LOOP, NOVEL], FLAT, DepthTuning())
    assert fast > 5 and plain == 1.0


def test_further_tokens_are_charged_and_a_pool_finds_earlier_outputs() -> None:
    """Breaks: drafts would seem free, and requests that repeat an earlier answer."""
    rising = 10.0 + 0.5 * np.maximum(0, np.arange(14) - 1)
    assert 1 < speedups([LOOP], rising, DepthTuning())[0] < speedups([LOOP], FLAT, DepthTuning())[0]
    first, again = speedups([NOVEL, NOVEL], FLAT, DepthTuning(), TextPool(200))
    assert first == 1.0 and again > 3
