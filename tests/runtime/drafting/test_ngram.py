"""Copying from the text so far."""

from __future__ import annotations

import numpy as np
from tide_runtime.drafting.ngram import NgramDrafter


def test_drafts_follow_the_last_place_that_ended_alike() -> None:
    """Refused drafts behind the end, or a place in the future, would be copied."""
    drafter, text = NgramDrafter(), np.array([1, 2, 3, 4, 1, 2, 3, 9, 9])  # 9: drafts that are refused
    assert drafter.draft(text, 7, 3) == [4, 1, 2]
    text[7:] = [4, 1]
    assert drafter.draft(text, 9, 6) == [2, 3, 4, 1, 2, 3]  # on with the period of four


def test_nothing_follows_a_new_end() -> None:
    """Any place would be copied from, or a text shorter than an n-gram looked up."""
    drafter = NgramDrafter()
    assert drafter.draft(np.array([1, 2]), 2, 4) == drafter.draft(np.array([1, 2, 3, 1, 2]), 5, 4) == []
    assert drafter.draft(np.array([1, 2, 3, 1, 2, 3]), 6, 0) == []
