"""When another guess of the draft head is worth its time."""

from __future__ import annotations

import pytest
from runtime.depth.speculation.made_up_speculator import made_up_speculator, made_up_state
from tide_runtime.bundle.calibration import CostTable, DraftHeadInfo, StepCost
from tide_runtime.depth.speculation.record import Guess, SpeculativeSequence
from tide_runtime.depth.speculation.speculator import Speculator


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
