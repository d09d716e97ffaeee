"""The figures of `benchmarks.quantised_kv`: what is compared with what, and what a percentage is of."""

from __future__ import annotations

import numpy as np
import pytest
from tide_bench.arms.base import Timing
from tide_bench.report import Report
from tide_bench.rounds import TimedRun

from benchmarks.quantised_kv import FP32, INT8, PLACES, add_results, fidelity, rows


def turns(step_ms: float, first_s: float, batch: int) -> list[TimedRun]:
    """Three rounds of four tokens each."""
    timing = Timing([[1, 2, 3, 4]] * batch, first_s, 3 * step_ms / 1e3)
    return [TimedRun(0, number, timing, 2**20, None) for number in range(3)]


def test_speed_is_of_int8_over_fp32() -> None:
    """A slower cache would be published as a faster one."""
    found = {p.name: {FP32: turns(2.0, 0.1, p.batch), INT8: turns(4.0, 0.3, p.batch)} for p in PLACES}
    report = Report("quantised_kv")
    add_results(report, {FP32: 400, INT8: 100}, found, {"int8_ppl_pct": 1.0})
    assert (report.results["fp32_bytes_per_token"], report.results["int8_bytes_per_token"]) == (400, 100)
    assert report.results["int8_vs_fp32_b8_900"] == pytest.approx(0.5)
    assert report.results["int8_vs_fp32_prefill_900"] == pytest.approx(1 / 3)
    assert report.results["fp32_b8_64"] == pytest.approx(4000) and report.results["int8_b1_64"] == pytest.approx(250)
    assert [(row["place"], row["kv"]) for row in rows(found)][:2] == [("b1_64", "fp32"), ("b1_64", "int8")]


def test_percentages_are_of_perplexity_over_fp32() -> None:
    """Losses would look like gains."""
    fp32 = np.log(np.array([0.5, 0.5]))
    found = fidelity({FP32: fp32, INT8: fp32 - 0.02})
    assert found["fp32_ppl"] == pytest.approx(2) and found["int8_ppl_pct"] == pytest.approx(100 * np.expm1(0.02))
    assert found["int8_ppl_pct_error"] == pytest.approx(0)
