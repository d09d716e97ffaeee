"""The points of the cost–performance curve, from synthetic readings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tide_bench.arms.tide import Reading
from tide_bench.counters import EnergyMeter
from tide_bench.curve import CERTIFIED, FULL, THRESHOLDS, measure_curve


class Reader:
    """`full` is right everywhere; `exit` misses one answer of four and runs half the layers."""

    def call(self, method: str, text: list[int], prompt_tokens: int, policy: str, threshold: float | None = None) -> Any:
        answers = text[prompt_tokens + 1 :]
        if policy == "full":
            return Reading(answers, [np.log(2)] * len(answers), 0.4, 24 * len(answers))
        return Reading([*answers[:-1], -1], [np.log(4)] * len(answers), 0.2, 12 * len(answers))


def test_costs_are_per_thousand_tokens_and_the_certified_point_is_there(tmp_path) -> None:
    """The curve would show other units than its axes name, or no mark for the bundle."""
    points = {p.name: p for p in measure_curve(Reader(), [[1, 2, 3, 4, 5, 6]] * 3, 1, EnergyMeter(tmp_path))}  # type: ignore[arg-type]
    full, certified = points[FULL], points[CERTIFIED]
    assert len(points) == len(THRESHOLDS) + 2
    assert (full.layer_passes, full.agreement, full.joules) == (24_000, 1, None) and full.ms == pytest.approx(100_000)
    assert (certified.layer_passes, certified.agreement) == (12_000, 0.75)
    assert certified.perplexity == pytest.approx(4) and full.perplexity == pytest.approx(2)
