"""The figures of `benchmarks.quantised_decode`: their names, what is over what, and perplexity in the tables and by arm."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tide_bench.arms.tide import Reading
from tide_bench.report import Report

from benchmarks.arms.perplexity import perplexity
from benchmarks.arms.plans import add_plan_tables
from benchmarks.quantised_decode import ARMS, PLANS, add_results


def test_names_of_results() -> None:
    """A ratio would be published under the name of its inverse, or of other bits."""
    report = Report("quantised_decode")
    ratios = {
        ("b1", "int4-fast", "genai-int4"): 0.9,
        ("b8", "int4-head4-same", "genai-int4"): 0.8,
        ("b1", "source-same", "int4-same"): 0.8,
        ("prefill_64", "int4-same", "llamacpp"): 3.0,
        ("prefill_512", "int4-same", "llamacpp"): 2.0,
    }
    add_results(report, ratios, "")
    assert report.results == {
        "int4_fast_vs_genai_b1": 0.9,
        "int4_head4_same_vs_genai_b8": 0.8,
        "source_over_int4": pytest.approx(1.25),
        "prefill_64_vs_llamacpp": 3.0,
        "prefill_512_vs_llamacpp": 2.0,
        "prefill_vs_llamacpp": 2.0,
    }


def test_pairs_are_of_arms() -> None:
    """A renamed arm would silently have no ratio."""
    assert {name for plan in PLANS.values() for pair in plan.pairs for name in pair} <= set(ARMS)


class Genai:
    """Looks like genai's arm; the logits of token t + 1 after t are 1, all others 0."""

    def __init__(self) -> None:
        self._og, self._model, self.token = self, None, 0

    def GeneratorParams(self, model: None) -> Genai:
        return self

    def Generator(self, model: None, params: Genai) -> Genai:
        return self

    def set_search_options(self, **options: object) -> None:
        pass

    def append_tokens(self, tokens: np.ndarray) -> None:
        self.token = int(tokens[0, 0])

    def get_logits(self) -> np.ndarray:
        return (np.arange(8) == self.token + 1).astype(np.float32)[None, None]


class Tide:
    def read(self, text: list[int], prompt_tokens: int, policy: str, bits: str) -> Reading:
        assert (policy, bits) == ("full", "fast")
        return Reading([], [math.log(2.0)] * (len(text) - 2), 0.0, 0)


def test_perplexity_of_arms() -> None:
    """Rows of one table would be about other tokens of the text."""
    sure = -math.log(math.e / (math.e + 7))
    assert perplexity(Genai(), "genai-int4", [1, 2, 3, 4], {}, 8) == pytest.approx(math.exp(sure))
    assert perplexity(Tide(), "tide", [1, 2, 3, 4], {"bits": "fast"}, 8) == pytest.approx(2.0)


def test_the_tables_have_perplexity_where_it_was_measured() -> None:
    """A faster row would not show what its speed costs."""
    plan, spread = PLANS["1b"], {f"ms_per_token{end}": 2.0 for end in ("", "_p10", "_p90")}
    spread |= {f"first_token_ms{end}": 2.0 for end in ("", "_p10", "_p90")}
    row = {"place": "b1", "arm": "int4-same", "title": "int4", "rounds": 1, "peak_mib": 1.0, "tokens_per_s": 1.0, **spread}
    for rows, shown in (([row | {"perplexity": 12.345}], True), ([row], False)):
        report = Report("quantised_decode")
        add_plan_tables(report, plan, rows, {}, "model", "")
        assert ("12.35" in report.tables[0].rows[0]) == shown
