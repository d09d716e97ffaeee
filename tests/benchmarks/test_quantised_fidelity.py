"""The figures of `benchmarks.quantised_fidelity`: what is compared with what, and what a percentage is of."""

from __future__ import annotations

import numpy as np
import pytest
from tide_bench.report import Report

from benchmarks.quantised_fidelity import EAGER, SOURCE, add_results, mapped_random, perplexity_rows, prose


@pytest.mark.parametrize(("kind", "kept"), [("Q4_K", 16), ("Q6_K", 16), ("awq", 14)])
def test_random_checkpoints_are_mapped(kind: str, kept: int) -> None:
    """A malformed file would be dequantised, and nothing low-bit compared."""
    row = mapped_random(kind)
    assert row["matrices"] == kept and row["notes"] == []  # 7 projections of 2 layers; GGUF also embedding and head
    assert row["fp32_max_dlogit"] < 1e-3 < row["int8_max_dlogit"]


def test_percentages_are_of_perplexity_over_the_source_as_it_runs() -> None:
    """A quantizer would be charged with what int8 activations already cost the source, or be given a gain that it has not."""
    eager = np.log(np.array([0.5, 0.5]))
    logprobs = {
        EAGER: eager,
        SOURCE: eager - 0.01,
        "int8 rtn": eager - 0.03,
        "w8a8": eager - 0.02,
        "int4 rtn": eager - 0.5,
        "int4 gptq_mixed": eager - 0.11,
    }
    rows = {row["form"]: row for row in perplexity_rows(logprobs)}
    assert rows[EAGER]["perplexity"] == pytest.approx(2)
    assert rows["int8 rtn"]["source_pct"] == pytest.approx(100 * np.expm1(0.02))
    assert rows["int8 rtn"]["eager_pct"] == pytest.approx(100 * np.expm1(0.03))
    assert rows["int8 rtn"]["source_pct_error"] == pytest.approx(0)  # every token lost the same
    report = Report("quantised_fidelity")
    add_results(report, [{"fp32_max_dlogit": 1e-6}, {"fp32_max_dlogit": 2e-4}], list(rows.values()))
    expected = {"mapped_max_dlogit": 2e-4, "int8_ppl_pct": 100 * np.expm1(0.02), "int4_ppl_pct": 100 * np.expm1(0.1)}
    expected["w8a8_ppl_pct"] = 100 * np.expm1(0.01)
    assert report.results == pytest.approx(expected)


def test_the_text_is_prose() -> None:
    """Tables of numbers and code would be most of the perplexity."""
    text = prose()
    assert len(text.split()) > 3000 and "|" not in text and "```" not in text
