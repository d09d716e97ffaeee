"""The plan of training: what fits into the minutes, in which order things are left out, and what the user is told."""

from itertools import product

from tide_calibrate.config import CalibrationConfig
from tide_calibrate.training_plan import STEPS, STEPS_FROM_NEIGHBOUR, TrainingPlan, plan_training

HEADS = {"identity": 8, "linear": 8, "tail:1": 8, "tail:2": 8}
SECONDS = {"identity": 0.034, "linear": 0.034, "tail:1": 0.051, "tail:2": 0.068}
DEFAULT = CalibrationConfig.minutes


def plan(minutes: float, slower: float = 1.0, workers: int = 2) -> TrainingPlan:
    return plan_training({kind: slower * step for kind, step in SECONDS.items()}, HEADS, minutes, workers)


def continued(made: TrainingPlan) -> list[str]:
    return made.affordable(["tail:2", "tail:1", "linear", "identity"])


def test_with_time_enough_the_default_minutes_train_the_default_steps() -> None:
    """A small model's heads must not depend on how fast the machine is."""
    for slower in (1e-6, 0.1, 1.0):
        made = plan(DEFAULT, slower)
        assert (made.steps, made.steps_from_neighbour) == (STEPS, STEPS_FROM_NEIGHBOUR)
        assert set(continued(made)) == set(HEADS)


def test_less_time_means_fewer_steps_then_fewer_kinds_after_all_candidates() -> None:
    made = [plan(minutes) for minutes in (8, 4, 3, 2, 1.2, 0.6, 0.01)]
    levels, kinds = [one.level for one in made], [len(continued(one)) for one in made]
    assert min(levels) == 0.25 and levels[0] == 1.0
    assert kinds == sorted(kinds, reverse=True) and kinds[0] == len(HEADS) and kinds[-1] == 0
    for one in made:
        if len(continued(one)) < len(HEADS):
            assert one.level <= 0.5, "steps must be given up before kinds"


def test_the_kinds_that_agree_best_go_on() -> None:
    """A kind that agrees less must not take the time of a better one, but may use what that one leaves."""
    made = plan(1.5)
    for best in HEADS:
        others = [kind for kind in HEADS if kind != best]
        assert made.affordable([best, *others])[0] == best


def test_what_is_planned_fits_and_a_kind_is_trained_in_a_chain() -> None:
    """Sixteen cores do not train a chain faster than one."""
    for minutes, workers in product((0.5, 1, 2, 4, 8, 16, 40), (1, 2, 16)):
        made = plan(minutes, workers=workers)
        assert made.seconds(continued(made)) <= made.budget or not continued(made)
    one, many = plan(8, 0.1, workers=1), plan(8, 0.1, workers=16)
    assert many.seconds(HEADS) >= 0.1 * SECONDS["tail:2"] * (STEPS + 7 * STEPS_FROM_NEIGHBOUR)
    assert one.seconds(HEADS) > 2 * many.seconds(HEADS)
    assert one.continued_work(HEADS) == many.continued_work(HEADS)


def test_steps_depend_on_minutes_and_hardly_on_the_machine() -> None:
    """On a fast machine the default must not train longer than it pays; step times vary, what is trained should not."""
    for times, level in ((1, 1.0), (2, 2.0), (4, 4.0), (100, 4.0)):
        assert plan(times * DEFAULT, slower=0.01).level == level
    assert plan(3) == plan(3)
    assert {plan(8, slower).level for slower in (0.5, 0.8, 1.0, 1.1)} == {1.0}
    assert "120 steps" in str(plan(8)) and "tail:2 68 ms" in str(plan(8))
