"""The plan of training: what fits into the minutes, in which order things are left out, and what the user is told."""

from __future__ import annotations

import pytest
from tide_calibrate.config import CalibrationConfig
from tide_calibrate.training_plan import STEPS, STEPS_FROM_NEIGHBOUR, TrainingPlan, plan_training

HEADS = {"identity": 8, "linear": 8, "tail:1": 8, "tail:2": 8}
SECONDS = {"identity": 0.034, "linear": 0.034, "tail:1": 0.051, "tail:2": 0.068}
DEFAULT = CalibrationConfig.minutes


def plan(minutes: float, slower: float = 1.0, workers: int = 2) -> TrainingPlan:
    return plan_training({kind: slower * step for kind, step in SECONDS.items()}, HEADS, minutes, workers)


def test_with_time_enough_the_default_minutes_train_the_default_steps() -> None:
    """A small model's heads must not depend on how fast the machine is."""
    for slower in (1e-6, 0.1, 1.0):
        made = plan(DEFAULT, slower)
        assert (made.steps, made.steps_from_neighbour) == (STEPS, STEPS_FROM_NEIGHBOUR)
        assert set(made.step_seconds) == set(HEADS)


def test_less_time_means_fewer_steps_then_fewer_kinds() -> None:
    """A head with fewer steps pays more than none; of the kinds, those with more layers agree most often."""
    made = [plan(minutes) for minutes in (8, 4, 3, 2, 1.2, 0.6, 0.01)]
    levels, kinds = [one.level for one in made], [len(one.step_seconds) for one in made]
    assert levels == sorted(levels, reverse=True) and kinds == sorted(kinds, reverse=True)
    assert min(levels) == 0.25 and len(set(levels)) == 3
    fewer = [one for one in made if len(one.step_seconds) < len(HEADS)]
    assert all(one.level == min(levels) for one in fewer)
    assert "tail:2" in fewer[0].step_seconds and "identity" not in fewer[0].step_seconds
    assert len(fewer[-1].step_seconds) == 1  # something is always trained


def test_what_is_planned_fits() -> None:
    for minutes in (0.5, 1, 2, 4, 8, 16, 40):
        for workers in (1, 2, 16):
            made = plan(minutes, workers=workers)
            assert made.seconds <= made.budget or len(made.step_seconds) == 1


def test_heads_of_a_kind_are_trained_one_after_another() -> None:
    """Sixteen cores do not train a chain faster than one."""
    one, many = plan(8, 0.1, workers=1), plan(8, 0.1, workers=16)
    assert many.seconds >= 0.1 * SECONDS["tail:2"] * (STEPS + 7 * STEPS_FROM_NEIGHBOUR)
    assert one.seconds > 2 * many.seconds
    assert one.training_work == many.training_work


@pytest.mark.parametrize(("minutes", "level"), [(DEFAULT, 1.0), (2 * DEFAULT, 2.0), (4 * DEFAULT, 4.0), (100 * DEFAULT, 4.0)])
def test_more_steps_need_more_minutes(minutes: float, level: float) -> None:
    """On a fast machine the default must not train longer than it pays."""
    assert plan(minutes, slower=0.01).level == level


def test_equal_times_give_an_equal_plan_and_small_changes_the_same_steps() -> None:
    """Step times are measured, so they vary; what is trained should not."""
    assert plan(3) == plan(3)
    assert {plan(8, slower).level for slower in (0.5, 0.8, 1.0, 1.1)} == {1.0}


def test_the_note_says_what_was_left_out() -> None:
    assert "no time" not in str(plan(8)) and "120 steps" in str(plan(8)) and "tail:2 68 ms" in str(plan(8))
    assert "no time for identity, linear, tail:2: give more --minutes" in str(plan(1.2))
