"""Training in a given time: the steps that were planned, reproducible heads, and a bar that ends full."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
from tide_runtime.errors import ParamsError

from tide_export.progress import ExportProgress

TOKENS, WINDOWS = 8, 48
EXITS = [(1, "identity"), (1, "linear"), (1, "tail:1"), (2, "identity"), (2, "linear"), (2, "tail:1")]


@pytest.fixture(scope="module")
def captured(llama: FrozenModel) -> Capture:
    ids = np.random.default_rng(0).integers(0, VOCAB, (WINDOWS, TOKENS))
    return capture_of(llama.model, ids, (1, 2, 3, 4), np.full(WINDOWS, TOKENS), np.zeros(WINDOWS))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_plan, "STEPS", 24)
    monkeypatch.setattr(training_plan, "STEPS_FROM_NEIGHBOUR", 12)


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Planned work of each bar, and the work that it was told of."""
    shown: list[list[float]] = []

    @contextmanager
    def bar(_progress: ExportProgress, _name: str, seconds: float) -> Iterator[Callable[[float], None]]:
        shown.append([seconds, 0.0])

        def advance(done: float) -> None:
            shown[-1][1] += done

        yield advance

    monkeypatch.setattr(exit_training, "training_bar", bar)
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


def test_the_kind_that_agrees_best_goes_on(llama: FrozenModel, captured: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time for one kind only goes to the one with the best agreement, its own layers counted as a loss."""
    monkeypatch.setattr(exit_training, "step_seconds", lambda *_: 1.0)
    for best in ("linear", "tail:1"):
        monkeypatch.setattr(exit_training, "_lead", lambda kind, *_, best=best: kind == best)
        minutes = _minutes_for([best])
        trained = _train(llama, captured, minutes)
        assert {key for key in trained if key[0] == 1} == {(1, best)}


def _minutes_for(kinds: list[str]) -> float:
    """Just enough time, at the fewest steps, for ``kinds`` after all candidates; step times are 1 s."""
    times, heads = ({kind: value for kind in ("identity", "linear", "tail:1")} for value in (1.0, 2))
    least = training_plan.TrainingPlan(0.25, times, heads, 0.0, len(os.sched_getaffinity(0)))
    return 1.01 * least.seconds(kinds) / (60 * training_plan._SHARE)


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), 1e9])
def test_minutes_out_of_range_are_refused(minutes: float) -> None:
    with pytest.raises(ParamsError, match="minutes is"):
        CalibrationConfig(minutes=minutes)
