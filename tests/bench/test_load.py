"""Requests that come when they like."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tide_bench.arm_pool import RunningArm
from tide_bench.arms import OTHER_ARMS, POLICIES
from tide_bench.arms.base import Timing
from tide_bench.config import BenchConfig
from tide_bench.load import Request
from tide_bench.load_mode import load_rows, poisson_requests, serve
from tide_bench.output_checks import Terms
from tide_bench.report import Phases


def test_arrivals_have_the_rate_and_an_end() -> None:
    """A run would be longer or heavier than configured."""
    requests = poisson_requests(50, 20, [[1], [2]], 16)
    gaps = np.diff([request.arrival_s for request in requests])
    assert max(request.arrival_s for request in requests) < 20 and gaps.mean() == pytest.approx(1 / 50, rel=0.15)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.2)  # of an exponential, not of a clock
    assert {request.new_tokens for request in requests} == {4, 16}


class SlowArm:
    """Takes a fixed time; ``seen``: prompts in the order they were taken."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: object) -> Timing:
        self.seen.append(prompts[0])
        return Timing([[0] * new_tokens], 0.25, 0.5)


def test_latency_counts_from_the_arrival_in_order() -> None:
    """Waiting in the queue would not count, or late requests overtake early ones."""
    arm = SlowArm()
    served = serve(arm, [Request(0.0, [1], 2), Request(0.0, [2], 2), Request(0.05, [3], 2)], 1, {})[0].served
    assert arm.seen == [[1], [2], [3]]
    assert all(s.first_token_s >= 0.25 and s.last_token_s == pytest.approx(s.first_token_s + 0.5) for s in served)


class FixedArm:
    """Says one token all the time, and lives here instead of in a process."""

    def __init__(self, token: int) -> None:
        self.token = token

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: object) -> Timing:
        return Timing([[self.token] * new_tokens], 0.001, 0.001)

    def apply(self, function: Any, *arguments: Any) -> Any:
        return function(self, *arguments)


def test_an_arm_that_answers_something_else_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is fast because it is wrong would look like the best one."""
    monkeypatch.setattr("tide_bench.load_mode.SETTLE_S", 0)
    arms = [POLICIES["full"], OTHER_ARMS["unsplit"], OTHER_ARMS["eager"]]
    entries = [RunningArm(arm, cast(Any, FixedArm(token))) for arm, token in zip(arms, (3, 3, 4), strict=True)]
    pool = SimpleNamespace(start=lambda *_: entries, gap=lambda *_: 1.0, failures={})
    config = BenchConfig(mode="load", rates=(0.01,), seconds=1, new_tokens=4)
    rows = load_rows(cast(Any, pool), arms, [[1], [2]], Terms(1e-3, None), config, Phases(print))
    assert [bool(row["mark"]) for row in rows] == [False, False, True]
    assert "new token 1 is 4, the model's 3" in rows[2]["mark"]
