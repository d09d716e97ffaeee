"""Training in a given time: the steps that were planned, reproducible heads, and a bar that ends full."""

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
