"""The GPU decode benchmark on a machine without one: what it says, what it counts, and how it reports what it will measure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from tide_bench.report import Report
from typer.testing import CliRunner

from benchmarks.gpu import decode_cuda
from benchmarks.gpu.decode_arms import WaitClock
from benchmarks.gpu.model_shapes import SHAPES


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decode_cuda.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(decode_cuda, "bundle", lambda *_: tmp_path)
    monkeypatch.setattr(decode_cuda.Bundle, "open", lambda path: SimpleNamespace(directory=path))


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(decode_cuda.main)
    return CliRunner().invoke(app, arguments)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_nothing_looks_measured() -> None:
    """A table of figures that nobody measured, or a green check."""
    done = run("--models", "demo,8b", "--batch", "1")
    assert done.exit_code == 2
    assert "NOT RUN: torch" in done.stderr and "no model was loaded on a GPU, run or timed" in done.stderr
    assert "16.1" in done.stdout or "15.0" in done.stdout  # GB that a step of the 8B shape reads in bf16
    assert "RESULT" not in done.stdout


@pytest.mark.usefixtures("no_gpu")
def test_an_unknown_model_is_named() -> None:
    """A typo would run the rest and leave a gap in the table."""
    assert "there is no model '7b'; choose from: demo" in run("--models", "7b").stderr.replace("\n", " ")


@pytest.mark.parametrize(("name", "least", "most"), [("1b", 1.1e9, 1.6e9), ("4b", 3.5e9, 4.6e9), ("8b", 7.4e9, 8.5e9)])
def test_shapes_are_of_the_size_they_are_called(name: str, least: float, most: float) -> None:
    """A ratio for a model of another size."""
    assert least < SHAPES[name].step_bytes("bf16", rows=1, length=1) / 2 < most


def test_ratios_are_the_others_time_over_ours() -> None:
    """Upside down they would say that cutting makes models faster."""
    report = Report("decode_cuda")
    arms = {
        name: {"ms_per_token": ms, "tokens_per_s": 1.0, "as_eager": 1.0}
        for name, ms in (("eager", 6.0), ("compile", 3.0), ("unsplit", 1.9), ("tide", 2.0))
    }
    arms["tide"]["host_ms_per_token"] = 0.5
    decode_cuda.record(report, "demo_fp32_b1", arms)
    assert report.results["demo_fp32_b1_vs_unsplit"] == pytest.approx(0.95)
    assert report.results["demo_fp32_b1_vs_eager"] == pytest.approx(3.0)
    assert report.results["demo_fp32_b1_tide_host_ms_per_token"] == 0.5
    assert decode_cuda.results_table(report).row_count == 1


def test_waiting_is_not_the_hosts_time() -> None:
    """Host time per token is what the loop costs where the GPU is faster."""
    calls = []
    device = SimpleNamespace(synchronize=lambda: calls.append(1))
    clock = WaitClock(device)  # type: ignore[arg-type]
    device.synchronize()
    assert calls == [1] and clock.seconds > 0
