"""How many tokens of their guesses the rows of a batch copy."""

from __future__ import annotations

from tide_runtime.draft_control import DraftControl, copy_lengths
from tide_runtime.trial import Trial


def row(hit_rate: float, guess: int) -> DraftControl:
    return DraftControl(Trial(), guess=[0] * guess, hit_rate=hit_rate)


def test_certain_copies_are_taken_from_the_first_on() -> None:
    """All of them are equally likely then; taken from the last, the pass would be costed for other tokens than it has."""
    assert copy_lengths([row(1.0, 12)], lambda rows, tokens, seq: 1.0 if tokens <= 5 else 100.0, 1.0) == [4]


def test_a_row_that_does_not_repeat_copies_nothing() -> None:
    """It would pay for its neighbour's repetition."""
    assert copy_lengths([row(0.9, 12), row(0.01, 5)], lambda rows, tokens, seq: 1 + 0.3 * tokens, 1.0)[1] == 0


def test_a_step_in_the_cost_is_looked_over() -> None:
    """Steps are rounded up: the first of four such tokens would seem too dear, and copying would stop before it."""
    assert copy_lengths([row(1.0, 12)], lambda rows, tokens, seq: 1 + 0.2 * -(-tokens // 4) * 4, 1.0) == [11]


def test_nothing_is_copied_where_exits_give_more() -> None:
    """Copies that are seldom right would take the place of drafts that mostly are."""
    assert copy_lengths([row(0.5, 12)], lambda rows, tokens, seq: 1.0, 3.0) == [0]
