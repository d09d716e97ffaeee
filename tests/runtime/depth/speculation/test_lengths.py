"""How many drafts of each row of a batch are verified."""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.depth.speculation.lengths import PassTime, choose_lengths
from tide_runtime.depth_tuning import DepthTuning


def row(hit_rate: float, guess: int) -> list[float]:
    """A sequence with so many drafts, each as likely to be right behind right ones."""
    return [hit_rate**n for n in range(1, guess + 1)]


def lengths_of(rows: Sequence[list[float]], pass_ms: PassTime, speedup: float) -> list[int]:
    return choose_lengths(rows, pass_ms, DepthTuning().padding_penalty, speedup).of


def test_certain_copies_are_taken_from_the_first_on() -> None:
    """All of them are equally likely then; taken from the last, the pass would be costed for other tokens than it has."""
    assert lengths_of([row(1.0, 12)], lambda rows, tokens, seq: 1.0 if tokens <= 5 else 100.0, 1.0) == [4]


def test_a_row_that_does_not_repeat_copies_nothing() -> None:
    """It would pay for its neighbour's repetition."""
    assert lengths_of([row(0.9, 12), row(0.01, 5)], lambda rows, tokens, seq: 1 + 0.3 * tokens, 1.0)[1] == 0


def test_a_step_in_the_cost_is_looked_over() -> None:
    """Steps are rounded up: the first of four such tokens would seem too dear, and copying would stop before it."""
    assert lengths_of([row(1.0, 12)], lambda rows, tokens, seq: 1 + 0.2 * -(-tokens // 4) * 4, 1.0) == [11]


def test_nothing_is_copied_where_exits_give_more() -> None:
    """Copies that are seldom right would take the place of drafts that mostly are."""
    assert lengths_of([row(0.5, 12)], lambda rows, tokens, seq: 1.0, 3.0) == [0]


def flat(rows: int, tokens: int, seq: int) -> float:
    """A pass that costs by its tokens alone."""
    return 1 + 0.1 * tokens


def test_rows_go_ahead_together_where_passes_cost_the_same() -> None:
    """One row would copy far ahead, and the others find nobody left to share a pass with."""
    rows = [row(0.95, 12), *(row(0.9, 12) for _ in range(7))]
    lengths = lengths_of(rows, lambda rows, tokens, seq: 1.0 + 0.02 * tokens, 1.0)
    assert max(lengths) < 12 and max(lengths) - min(lengths) <= 1


def test_few_guesses_are_weighed_against_the_least_pass_that_checks_any() -> None:
    """Guesses that do not pay for any pass would be verified, or those that do would not."""

    def dear(rows: int, tokens: int, seq: int) -> float:
        return 1.0 if tokens == rows else 1.5

    assert lengths_of([row(0.6, 1), row(0.6, 1), row(0.5, 0)], dear, 1.0) == [0, 0, 0]
    assert lengths_of([row(0.99, 1), row(0.99, 1), row(0.5, 0)], dear, 1.0) == [1, 1, 0]


def test_all_rows_copy_where_even_ones_cost_least() -> None:
    """They would be refused for the price of uneven rows, which is passed on the way."""

    def even_is_cheap(rows: int, tokens: int, seq: int) -> float:
        if tokens == rows:
            return 1.0
        return 1.2 if tokens == rows * seq else 1.5

    assert lengths_of([row(0.45, 1)] * 3, even_is_cheap, 1.0) == [1, 1, 1]
