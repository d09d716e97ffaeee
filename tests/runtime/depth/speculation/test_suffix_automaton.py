"""The longest end of a text that occurred before, against a search through all places."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tide_runtime.depth.speculation.text import SuffixAutomaton

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
