"""Drafts that are copied from the text."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tide_runtime.depth.speculation.record import Guess
from tide_runtime.depth.speculation.text import SequenceText, SuffixAutomaton

TEXTS = st.lists(st.integers(0, 2), max_size=40)  # few letters, so that much repeats


def occurs(part: list[int], text: list[int]) -> bool:
    return any(text[start : start + len(part)] == part for start in range(len(text) - len(part) + 1))


def longest_end(text: list[int], places: list[int]) -> int:
    """Length of the longest end of ``text`` that occurs in ``places``."""
    return max(n for n in range(len(text) + 1) if not n or occurs(text[-n:], places))


@given(TEXTS)
def test_the_longest_end_that_occurred_before_is_found_after_every_token(text: list[int]) -> None:
    """Breaks: drafts from a shorter match, which are accepted less often, or from a place that does not match."""
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, 1):
        automaton.extend([token])
        known = text[:count]
        matched, end = automaton.length[automaton.state], automaton.end[automaton.state]
        assert matched == longest_end(known, known[:-1])
        assert end < count or not matched
        assert known[end - matched : end] == known[count - matched :]


def test_a_match_moves_on_to_its_latest_place() -> None:
    """Breaks: drafts from a place that the text has left long ago."""
    automaton = SuffixAutomaton()
    automaton.extend([7, 1, 7, 2, 7])
    automaton.extend([3, 7])
    assert automaton.end[automaton.state] == 5


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
