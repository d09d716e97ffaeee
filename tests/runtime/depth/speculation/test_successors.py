"""Tokens that followed the same ones in earlier replies."""

import numpy as np
from runtime.depth.speculation.made_up_speculator import made_up_speculator, made_up_state
from tide_runtime.bundle.calibration import CostTable, StepCost
from tide_runtime.depth.speculation.record import Guess
from tide_runtime.depth.speculation.successors import SequenceSuccessors, SuccessorTable


def filled(*replies: list[int], salt: str | None = None, entries: int = 1000) -> SuccessorTable:
    table = SuccessorTable(entries)
    for reply in replies:
        table.learn(salt, reply, 1)
    return table


def guess(table: SuccessorTable, tokens: list[int], limit: int = 4, salt: str | None = None) -> Guess:
    return SequenceSuccessors(table, salt).guess(np.array(tokens), len(tokens), limit)


def test_the_longest_known_end_decides() -> None:
    """Breaks: a guess after one token, which is right half as often, where three are known."""
    table = filled([1, 2, 3, 4], [9, 2, 3, 5], [8, 3, 6])
    assert guess(table, [1, 2, 3], 1) == Guess([4], [3], "successor")
    assert guess(table, [7, 2, 3], 1) == Guess([5], [2], "successor")
    assert guess(table, [7, 7, 3], 1) == Guess([6], [1], "successor")
    assert guess(table, [7, 7, 7], 1).tokens == []


def test_the_latest_reply_decides_between_two() -> None:
    assert guess(filled([1, 2, 3, 4], [1, 2, 3, 5]), [1, 2, 3], 1).tokens == [5]


def test_guesses_go_on_behind_three_known_tokens_only() -> None:
    """Breaks: chains of guesses of which hardly the first is right, which cost the host and a pass of more tokens."""
    table = filled([1, 2, 3, 4, 5, 6, 7, 8])
    assert guess(table, [1, 2, 3], 2) == Guess([4, 5], [3, 4], "successor")
    assert guess(table, [1, 2, 3], 9).tokens == [4, 5, 6], "no more than matched"
    assert guess(table, [7, 2, 3], 9) == Guess([4], [2], "successor")
    assert guess(table, [1, 2, 3], 0).tokens == []


def test_a_reply_that_comes_again_is_trusted_more() -> None:
    """Breaks: a repeated reply, which would be guessed as carefully at its end as at its beginning."""
    sequence, text = SequenceSuccessors(filled([1, 2, 3, 4, 5, 6, 7])), np.array([1, 2, 3, 4, 5, 6])
    sequence.guess(text, 3, 1)
    sequence.learn(text, 3, [4])
    assert sequence.guess(text, 4, 1) == Guess([5], [4], "successor")
    sequence.learn(text, 4, [9])
    assert sequence.run == 0


def test_a_reply_is_learned_while_it_grows() -> None:
    """Breaks: requests that run together, which would draft for one another only after their end."""
    table = SuccessorTable(100)
    text = np.array([1, 2, 3])
    SequenceSuccessors(table).learn(text, 3, [4, 5])
    assert guess(table, [2, 3, 4], 1) == Guess([5], [3], "successor")
    assert guess(table, [1, 2], 1).tokens == [], "prompts are not learned"


def test_salts_keep_replies_apart() -> None:
    """Breaks: a tenant's reply would draft for another's, and show in how fast it runs."""
    table = filled([1, 2, 3, 4], salt="mine")
    assert guess(table, [1, 2, 3], 1, "mine").tokens == [4]
    assert guess(table, [1, 2, 3]).tokens == guess(table, [1, 2, 3], 1, "other").tokens == []


def test_the_table_keeps_what_was_learned_last() -> None:
    """Breaks: an engine whose memory grows with every request and tenant."""
    table = SuccessorTable(30)
    for start in range(0, 1000, 10):
        table.learn(str(start), list(range(start, start + 10)), 1)
    assert len(table) == 30
    assert guess(table, [990, 991], 1, "990").tokens == [992]
    assert guess(table, [900, 901], 1, "900").tokens == []


def test_a_token_that_costs_nothing_is_drafted_at_one_in_seven() -> None:
    """Breaks: machines that pad a launch to two rows would compute a row without use."""
    for second, drafted in ((10.0, [5]), (12.0, [])):
        prices = [StepCost(1, tokens, 0.0, ms, 0.0, 0.0, 0.0) for tokens, ms in ((1, 10.0), (2, second), (3, 30.0))]
        speculator = made_up_speculator(CostTable("cpu", "here", 10.0, prices))
        state = made_up_state(speculator)
        state.successor_guess = Guess([5], [1], "successor")
        speculator.place_drafts([state], 0)
        assert [draft.token for draft in state.drafts] == drafted
