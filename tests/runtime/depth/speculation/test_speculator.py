"""What is drafted: guesses of a head that pays, copies that a grammar allows, at prices that are observed."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from runtime.depth.speculation.made_up_speculator import made_up_speculator, made_up_state
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.calibration import CostTable, DraftHeadInfo, ExitInfo, StepCost
from tide_runtime.depth.speculation.drafter import Evaluation
from tide_runtime.depth.speculation.record import Guess, SpeculativeSequence
from tide_runtime.depth.speculation.speculator import Speculator
from tide_runtime.depth.tuning import DepthTuning


def speculator(extra_ms: float, guess_ms: float, right: float = 0.5) -> Speculator:
    """A pass takes 10 ms and ``extra_ms`` for each further token, a guess ``guess_ms``; so many guesses are ``right``."""
    steps = [
        StepCost(rows, seq, 0.0, 10 + extra_ms * (rows * seq - 1), guess_ms, guess_ms, 0.0)
        for rows in (1, 8)
        for seq in (1, 2, 8)
    ]
    info = DraftHeadInfo([1], 8, 100, [right, right], [[0.0, 0.1], [0.5, 0.9]])
    return made_up_speculator(CostTable("cpu", "here", 10.0, steps), head=info)


def guess(state: SpeculativeSequence, *scores: float) -> None:
    state.head_guess = Guess([7] * len(scores), scores, "head")


def pays(made: Speculator, state: SpeculativeSequence) -> bool:
    return made.head_pays([state], (1, 1), len(state.head_guess.tokens), 0)


@pytest.mark.parametrize(("extra_ms", "guess_ms", "right", "expected"), [
    (0.1, 0.5, 0.5, True),
    (0.1, 6.0, 0.5, False),  # half a token for 6 ms is less than one for 10
    (6.0, 0.5, 0.5, False),
    (0.1, 0.5, 0.05, False),
])  # fmt: skip
def test_a_guess_is_weighed_against_the_time_it_takes(extra_ms: float, guess_ms: float, right: float, expected: bool) -> None:
    """Breaks: a model with a large vocabulary, or low-bit weights, would be slowed down by guesses."""
    made = speculator(extra_ms, guess_ms, right)
    assert pays(made, made_up_state(made, head_room=8)) is expected


def test_guessing_ends_after_a_guess_that_is_likely_wrong() -> None:
    """Breaks: whatever follows a wrong guess is refused with it, at the price of the launch and of its verification."""
    made = speculator(0.3, 0.6)
    sure, doubtful = (made_up_state(made, head_room=8) for _ in range(2))
    guess(sure, 0.95)
    guess(doubtful, 0.05)
    assert pays(made, sure) and not pays(made, doubtful)


def test_there_are_no_more_guesses_than_room() -> None:
    """Breaks: guesses after the output's last token, or more than the cache takes."""
    made = speculator(0.0, 0.0)
    state = made_up_state(made, head_room=2)
    assert pays(made, state)
    guess(state, 0.95, 0.95)
    assert not pays(made, state)


def test_a_sequence_learns_that_the_head_does_not_know_its_text() -> None:
    """Breaks: a text in another language would be slowed down to its end."""
    made = speculator(0.6, 1.5)
    state = made_up_state(made, head_room=4)
    assert pays(made, state)
    for _ in range(12):
        guess(state, 0.6)
        made.observe([state], [[8]], None, None)
    state.begin_step()
    state.head_room = 4
    assert not pays(made, state)


class Copies:
    """A text drafter that always guesses the same three tokens."""

    limit = 12

    def draft(self, context: ExecutionContext, states: Sequence[SpeculativeSequence]) -> list[Evaluation]:
        for state in states:
            state.guess = Guess([4, 5, 6], [30, 31, 32], "ngram")
        return []


class OnlyFour:
    """A grammar that allows token 4 once, and forces nothing."""

    def forced(self) -> list[int]:
        return []

    def num_valid(self, tokens: Sequence[int]) -> int:
        return int(list(tokens[:1]) == [4])


def test_copies_that_the_grammar_refuses_are_not_drafted() -> None:
    """They cannot be accepted: their rows would be verified for nothing, and count as misses of the text."""
    speculator = made_up_speculator(None)
    speculator.text = [Copies()]
    state = made_up_state(speculator)
    state.sequence.grammar = cast(Any, OnlyFour())
    speculator.propose(cast(ExecutionContext, None), [state], [])
    assert list(state.guess.tokens) == [4]
    assert {draft.token for draft in state.drafts} <= {4}


TABLE = CostTable("cpu", "here", 10.0, [StepCost(1, seq, 0.0, 9.0 + seq, 0.0, 0.0, 0.0) for seq in (1, 13)])


EXIT = ExitInfo(1, "identity", "max_probability", 0.5)


def drafted(speculator: Speculator) -> int:
    """Drafts of a text whose last three tokens occurred before."""
    state = made_up_state(speculator)
    state.guess = Guess([5] * 12, range(3, 15), "ngram")
    speculator.place_drafts([state], 0)
    return len(state.drafts)


def serve_expensive_drafts(speculator: Speculator) -> None:
    for _ in range(200):
        for drafts in (0, 3):
            state = made_up_state(speculator)
            for _ in range(drafts):
                state.place(5, "ngram")
            speculator.observe([state], [[5]], 10.0 if not drafts else 13.0 * 4**0.3, None)


def test_fewer_drafts_are_verified_where_they_have_become_expensive() -> None:
    """With outdated prices, verifying drafts takes longer than the tokens they save, and a text is slower than under `full`."""
    speculator = made_up_speculator(TABLE)
    before = drafted(speculator)
    serve_expensive_drafts(speculator)
    assert 0 < drafted(speculator) < before


@pytest.mark.parametrize(
    "changes",
    [
        {"tuning": DepthTuning(clock_rate=0.0)},
        {"exits": (EXIT,)},  # with corrected passes and uncorrected exits, exits would draft too often
        {"follows_clock": False},  # where sums differ, a text must not depend on what else the machine does
        {"passes": None},  # prices are the calibration's then, or guessed
    ],
)
def test_prices_stay_as_they_are(changes: dict[str, Any]) -> None:
    speculator = made_up_speculator(**{"passes": TABLE, **changes})
    serve_expensive_drafts(speculator)
    assert speculator.clock.tilt == 0.0
