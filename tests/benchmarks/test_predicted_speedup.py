"""Predictions held against the clock: ratios of summed times, and exits that torch runs as they were calibrated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from calibrate.synthetic_calibration import synthetic_file
from export.architectures import tiny_model
from tide_bench.report import Report
from tide_calibrate.exit_heads import make_head
from tide_calibrate.exits_file import write_exits
from tide_calibrate.model.frozen import FrozenModel
from tide_runtime.bundle.calibration import ExitInfo

from benchmarks.arms.turns import Turn
from benchmarks.exits.recalled_exits import recalled_exits
from benchmarks.predicted_speedup import add_results, total_ratio
from tide_export.calibration.calibration_file import EXITS_NAME


def turns(*seconds: float) -> list[Turn]:
    return [Turn([[1, 2]], one, layers_per_token=6.0, base_seconds=4.0) for one in seconds]


def test_long_texts_weigh_more() -> None:
    """Predictions are of summed times; a median of ratios would let short easy texts hide long hard ones."""
    ratio, low, high = total_ratio(turns(1.0, 1.0, 4.0))
    assert ratio == pytest.approx(2.0)
    assert low <= ratio <= high
    assert (low, high) == pytest.approx((1.0, 4.0))


def test_the_worst_error_counts_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    """A prediction that is too low is as wrong as one that is too high."""
    report = Report("predicted_speedup")
    arms = {"a": turns(1.0, 1.0), "b": turns(2.0, 2.0)}
    add_results(report, {"a": (3.2, 4.0), "b": (2.1, 2.2)}, arms)
    assert report.results["predicted_over_measured_a"] == pytest.approx(0.8)
    assert report.results["predicted_worst_error_pct"] == pytest.approx(20)
    assert report.results["replayed_worst_error_pct"] == pytest.approx(10)
    assert "3.20" in capsys.readouterr().out


def test_exits_are_recalled_with_their_weights(tmp_path: Path) -> None:
    """An untrained translator in place of the calibrated one would blame the cost model for the head's guesses."""
    model = FrozenModel(tiny_model("llama"))
    head = make_head("linear", model, 1, rank=4)
    assert head.translator is not None
    torch.nn.init.normal_(head.translator.up)
    write_exits(tmp_path / EXITS_NAME, {1: head}, {})
    file = synthetic_file([ExitInfo(1, "linear", "max_probability", 0.5, exit_threshold=0.9)])
    (recalled,) = recalled_exits(model, file, tmp_path).values()
    states = {1: torch.randn(1, 3, model.hidden_size)}
    assert torch.equal(recalled.head.logits(states), head.logits(states))
