"""Copying from the text so far, and from recent outputs."""

from __future__ import annotations

import numpy as np
from tide_runtime.depth.speculation.record import Guess
from tide_runtime.depth.speculation.text import SequenceText, TextPool, TextPools


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


def test_outputs_of_others_are_copied_where_they_match_further() -> None:
    """Breaks: the pool, and texts whose own repetition is longer than what others have in common with them."""
    pool = TextPool(100)
    pool.add([5, 6, 7, 8, 9])
    drafter = SequenceText(pool)
    assert drafter.guess(np.array([6, 1, 6, 7]), 4, 4) == copied([8, 9], 2)  # not beyond the output's end
    assert drafter.guess(np.array([6, 1, 6, 7, 1, 6, 7]), 7, 1) == copied([1], 3)


def test_an_output_that_ended_there_leaves_the_texts_own_guess() -> None:
    """Breaks: a text that repeats itself, behind the last words of an earlier output."""
    pool = TextPool(100)
    pool.add([5, 6, 7])
    assert SequenceText(pool).guess(np.array([7, 8, 5, 6, 7]), 5, 1) == copied([8], 1)


def test_outputs_that_end_later_are_found_by_sequences_under_way() -> None:
    """Breaks: requests that run together, which would draft only from those before them."""
    pool = TextPool(100)
    drafter, text = SequenceText(pool), np.array([1, 2, 3, 4])
    assert drafter.guess(text, 2, 2).tokens == ()
    pool.add([2, 3, 4, 5])
    assert drafter.guess(text, 4, 2) == copied([5], 2)  # it has followed the pool since then


def test_a_pool_keeps_the_recent_outputs_only() -> None:
    """Breaks: an engine whose memory grows with every request."""
    pool = TextPool(40)
    for start in range(0, 1000, 10):
        pool.add(range(start, start + 10))
    assert sum(len(automaton.text) for automaton in pool.automata) <= 44
    assert SequenceText(pool).guess(np.array([990, 991]), 2, 1).tokens == [992]
    assert SequenceText(pool).guess(np.array([900, 901]), 2, 1).tokens == ()


def test_salts_keep_outputs_apart() -> None:
    """Breaks: a tenant's output would draft for another's, and show in how fast it runs."""
    pools = TextPools(100)
    mine, none = pools.of("a"), TextPools(0).of(None)
    assert mine is pools.of("a") is not pools.of(None) and none is None


def test_the_pools_of_all_salts_share_one_limit() -> None:
    """Breaks: an engine whose memory grows with every tenant or session."""
    pools = TextPools(100)
    for salt in "abcdef":
        pools.of(salt).add(range(29))  # type: ignore[union-attr]
    first, last = pools.of("a"), pools.of("f")
    assert first is not None and last is not None and first.tokens == 0 and last.tokens == 30
