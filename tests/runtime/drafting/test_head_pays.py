"""When another guess of the draft head is worth its time."""

from __future__ import annotations

import pytest
from tide_runtime.bundle.calibration import CostTable, DraftHeadInfo, StepCost
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth_tuning import DepthTuning
from tide_runtime.drafting.controller import DraftController, DraftState
from tide_runtime.generation_params import GenerationParams

TUNING = DepthTuning()


def controller(extra_ms: float, guess_ms: float, right: float = 0.5) -> DraftController:
    """A pass takes 10 ms and ``extra_ms`` for each further token, a guess ``guess_ms``; so many guesses are ``right``."""
    steps = [
        StepCost(rows, seq, 0.0, 10 + extra_ms * (rows * seq - 1), guess_ms, guess_ms, 0.0)
        for rows in (1, 8)
        for seq in (1, 2, 8)
    ]
    info = DraftHeadInfo(1, 100, [right, right], [[0.0, 0.1], [0.5, 0.9]])
    costs = CostModel(None, [0, 4], passes=CostTable("cpu", "here", 10.0, steps))
    return DraftController(costs, TUNING, [], None, {}, measured=False, draft_head=info)


def states(control: DraftController, count: int = 1, room: int = 8) -> list[DraftState]:
    made = [control.start(GenerationParams()) for _ in range(count)]
    assert all(state.starts_head(room, [], 0.0) for state in made)
    return made


def guess(state: DraftState, score: float) -> None:
    assert state.head is not None
    state.head.tokens.append(7)
    state.head.scores.append(score)


def pays(control: DraftController, made: list[DraftState], spent_ms: float = 0.0) -> bool:
    return control.head_pays(made, [[] for _ in made], range(len(made)), spent_ms, 0)


@pytest.mark.parametrize(("extra_ms", "guess_ms", "right", "expected"), [
    (0.1, 0.5, 0.5, True),
    (0.1, 6.0, 0.5, False),  # half a token for 6 ms is less than one for 10
    (6.0, 0.5, 0.5, False),
    (0.1, 0.5, 0.05, False),
])  # fmt: skip
def test_a_guess_is_weighed_against_the_time_it_takes(extra_ms: float, guess_ms: float, right: float, expected: bool) -> None:
    """Breaks: a model with a large vocabulary, or low-bit weights, would be slowed down by guesses."""
    control = controller(extra_ms, guess_ms, right)
    assert pays(control, states(control)) is expected


def test_guessing_ends_behind_a_guess_that_is_likely_wrong() -> None:
    """Breaks: whatever follows a wrong guess is refused with it, at the price of the launch and of its verification."""
    control = controller(0.3, 0.6)
    sure, doubtful = states(control, 2)
    guess(sure, 0.95)
    guess(doubtful, 0.05)
    assert pays(control, [sure], 0.6) and not pays(control, [doubtful], 0.6)


def test_there_are_no_more_guesses_than_room() -> None:
    """Breaks: guesses behind the output's last token, or more than the cache takes."""
    control = controller(0.0, 0.0)
    (state,) = states(control, room=2)
    assert pays(control, [state])
    guess(state, 0.95)
    guess(state, 0.95)
    assert not pays(control, [state])


def test_a_sequence_learns_that_the_head_does_not_know_its_text() -> None:
    """Breaks: a text in another language would be slowed down to its end."""
    control = controller(0.6, 1.5)
    (state,) = states(control)
    for _ in range(12):
        assert state.head is not None
        state.head.start_guessing(4)
        guess(state, 0.6)
        state.observe_tokens([8])
    state.starts_head(4, [], 0.0)
    assert not pays(control, [state])
