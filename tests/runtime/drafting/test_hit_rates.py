"""Acceptance of text drafts by the length of the match."""

from __future__ import annotations

from tide_runtime.drafting.hit_rates import HitRates
from tide_runtime.drafting.text_drafter import Guess


def test_longer_matches_are_expected_to_hold_more_often() -> None:
    """Breaks: long drafts behind a single word that happens to recur."""
    rates = HitRates(8, 100)
    assert 0 < rates.rate(1) < rates.rate(3) < rates.rate(8) < rates.rate(100) < 1


def test_a_sequence_learns_what_its_matches_are_worth() -> None:
    """Breaks: texts that repeat although texts seldom do, and lists whose entries begin alike and go on differently."""
    rates = HitRates(4, 10)
    before = rates.rate(2)
    for _ in range(20):
        rates.observe(Guess([5], 2), [5, 6])
    assert rates.rate(2) > before
    for _ in range(40):
        rates.observe(Guess([5], 2), [4])
    assert rates.rate(2) < before / 2


def test_each_token_behind_a_match_is_of_a_longer_one() -> None:
    """Breaks: the second token of a draft would be taken for as doubtful as the first."""
    rates = HitRates(8, 100)
    first, second, third = rates.chances(Guess([1, 2, 3], 1))
    assert first == rates.rate(1) and second == first * rates.rate(2) and third == second * rates.rate(3)


def test_tokens_behind_a_wrong_one_count_nothing() -> None:
    """Breaks: chance agreement behind a refused draft would be taken for its acceptance."""
    rates, same = HitRates(8, 100), HitRates(8, 100)
    rates.observe(Guess([1, 2, 3], 2), [1, 9, 3])
    same.observe(Guess([1, 2], 2), [1, 9])
    assert [rates.rate(n) for n in range(1, 9)] == [same.rate(n) for n in range(1, 9)]
