"""Copying from the text so far."""

from __future__ import annotations

import numpy as np
from tide_runtime.depth.speculation.record import Guess
from tide_runtime.depth.speculation.text import SequenceText


def copied(tokens: list[int], matched: int) -> Guess:
    return Guess(tokens, range(matched, matched + len(tokens)), "ngram")


def test_guesses_follow_the_last_place_that_ended_alike() -> None:
    """Breaks: refused drafts behind the end, or a place in the future, would be copied."""
    drafter, text = SequenceText(), np.array([1, 2, 3, 4, 1, 2, 3, 9, 9])  # 9: drafts that are refused
    assert drafter.guess(text, 7, 3) == copied([4, 1, 2], 3)
    text[7:] = [4, 1]
    assert drafter.guess(text, 9, 6) == copied([2, 3, 4, 1, 2, 3], 5)  # on with the period of four


def test_nothing_follows_a_new_end() -> None:
    """Breaks: any place would be copied from, or a guess made where no draft has room."""
    assert SequenceText().guess(np.array([1, 2]), 2, 4).tokens == ()
    assert SequenceText().guess(np.array([1, 2, 3, 1, 2, 3]), 6, 0).tokens == ()
