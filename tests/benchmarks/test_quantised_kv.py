"""The figures of `benchmarks.quantised_kv`: what is compared with what, and what a percentage is of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tide_bench.report import Report

from benchmarks.arms.plans import add_plan_tables
from benchmarks.quantised_kv import FP32, INT8, PLAN, add_results, fidelity


def rows() -> list[dict[str, Any]]:
    """int8 takes twice the time for a step and three times for a prompt."""
    found = []
    for place in PLAN.places:
        for kv, ratio in ((FP32, None), (INT8, 1 / 3 if place.mode == "prefill" else 0.5)):
            spread = {f"{name}{end}": 2.0 for name in ("ms_per_token", "first_token_ms") for end in ("", "_p10", "_p90")}
            row = {"place": place.name, "arm": kv, "title": kv, "rounds": 3, "peak_mib": 10.0, **spread}
            row |= {} if place.mode == "prefill" else {"tokens_per_s": 500.0 * (ratio or 1) * place.batch}
            found.append(row if ratio is None else row | {f"vs_fp32{end}": ratio for end in ("", "_low", "_high")})
    return found


def test_speed_is_of_int8_over_fp32() -> None:
    """A slower cache would be published as a faster one."""
    report = Report("quantised_kv")
    add_results(report, {FP32: 400, INT8: 100}, rows(), {"int8_ppl_pct": 1.0})
    assert (report.results["fp32_bytes_per_token"], report.results["int8_bytes_per_token"]) == (400, 100)
    assert report.results["int8_vs_fp32_b8_900"] == pytest.approx(0.5)
    assert report.results["int8_vs_fp32_prefill_900"] == pytest.approx(1 / 3)
    assert report.results["fp32_b8_64"] == pytest.approx(4000) and report.results["int8_b1_64"] == pytest.approx(250)
    add_plan_tables(report, PLAN, rows(), {FP32: FP32}, "model", "medians")
    assert [[row[0], row[4]] for row in report.tables[0].rows] == [["fp32", "1"], ["int8", "0.50 (0.50–0.50)"]]


def test_percentages_are_of_perplexity_over_fp32() -> None:
    """Losses would look like gains."""
    fp32 = np.log(np.array([0.5, 0.5]))
    found = fidelity({FP32: fp32, INT8: fp32 - 0.02})
    assert found["fp32_ppl"] == pytest.approx(2) and found["int8_ppl_pct"] == pytest.approx(100 * np.expm1(0.02))
    assert found["int8_ppl_pct_error"] == pytest.approx(0)


def test_a_place_that_is_not_planned_is_refused() -> None:
    """The run would measure nothing for some minutes."""
    assert [place.name for place in PLAN.restricted(None, ["b8_64"]).places] == ["b8_64"]
    with pytest.raises(ValueError, match="b2; choose from: b1_64"):
        PLAN.restricted(None, ["b2"])
