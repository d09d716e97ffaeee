"""Training in a given time: what fits and in which order things are left out, reproducible heads, and a bar that ends full."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from calibrate.captured import capture_of
from export.architectures import VOCAB
from rich.console import Console
from tide_calibrate import exit_training, training_plan
from tide_calibrate.capture.store import Capture
from tide_calibrate.config import CalibrationConfig
from tide_calibrate.exit_training import train_exits
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.training_plan import STEPS, STEPS_FROM_NEIGHBOUR, TrainingPlan, plan_training

from tide_export.progress import ExportProgress

TOKENS, WINDOWS = 8, 48
EXITS = [(1, "identity"), (1, "linear"), (1, "tail:1"), (2, "identity"), (2, "linear"), (2, "tail:1")]


@pytest.fixture(scope="module")
def captured(llama: FrozenModel) -> Capture:
    ids = np.random.default_rng(0).integers(0, VOCAB, (WINDOWS, TOKENS))
    return capture_of(llama.model, ids, (1, 2, 3, 4), np.full(WINDOWS, TOKENS), np.zeros(WINDOWS))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_plan, "STEPS", 24)
    monkeypatch.setattr(training_plan, "STEPS_FROM_NEIGHBOUR", 12)


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch, quick: None) -> list[list[float]]:
    """Planned work of each bar, and the work that it was told of."""
    shown: list[list[float]] = []

    @contextmanager
    def bar(_progress: ExportProgress, _name: str, seconds: float) -> Iterator[SimpleNamespace]:
        shown.append([seconds, 0.0])

        def advance(done: float) -> None:
            shown[-1][1] += done

        yield SimpleNamespace(advance=advance)

    monkeypatch.setattr(ExportProgress, "steps", bar)
    return shown


def _train(model: FrozenModel, captured: Capture, minutes: float = 8.0, progress: ExportProgress | None = None) -> dict:
    config = CalibrationConfig(minutes=minutes, rank=8)
    return train_exits(model, captured, EXITS, config, progress or ExportProgress(quiet=True), None)


def test_planning_does_not_change_what_is_trained(
    llama: FrozenModel, captured: Capture, bars: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are timed on heads of their own; a head that had taken some of them would differ from run to run."""
    first = _train(llama, captured)
    monkeypatch.setattr(exit_training, "step_seconds", lambda *_: 1e-3)
    second = _train(llama, captured)
    assert list(first) == list(second) == EXITS
    for key in EXITS:
        for one, other in zip(first[key].head.trained(), second[key].head.trained(), strict=True):
            assert torch.equal(one, other)
    for planned, done in bars:
        assert done == pytest.approx(planned), "the bar must end full, also where a head was trained to the end early"


def test_every_kind_is_trained_after_its_deepest_candidate(
    llama: FrozenModel, captured: Capture, bars: list[list[float]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Without a head of each kind, the answer that exits do not pay would be of the kinds that were tried only."""
    monkeypatch.setattr(exit_training, "step_seconds", lambda head, *_: {"linear": 1.0, "tail:1": 2.0}[head.kind])
    progress = ExportProgress(Console(width=300, stderr=True))
    trained = _train(llama, captured, minutes=0.01, progress=progress)
    assert list(trained) == [(2, "identity"), (2, "linear"), (2, "tail:1")]
    assert "after shallower candidates: give more --minutes" in capsys.readouterr().err
    for planned, done in bars:
        assert done == pytest.approx(planned)


# --- The plan

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
