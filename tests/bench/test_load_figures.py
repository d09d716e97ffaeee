"""Clients of the load generator on a made-up server, and the figures made of what they saw."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from benchmarks.serving.load import (
    LoadRun,
    Request,
    Served,
    capacity,
    closed_loop,
    latency_row,
    open_loop,
    percentiles,
    speed_ratio,
)
from tide_bench.arms.process import ArmError


class CountingServer:
    """Answers without computing, and knows how many requests were open at once, and when each came."""

    def __init__(self, pause: float = 0.0) -> None:
        self.open = self.most_open = 0
        self.came: list[float] = []
        self._pause, self._lock, self._begin = pause, threading.Lock(), time.perf_counter()

    def stream(self, request: Request) -> Iterator[None]:
        with self._lock:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            self.came.append(time.perf_counter() - self._begin)
        time.sleep(self._pause)
        for _ in range(request.new_tokens):
            yield
        with self._lock:
            self.open -= 1


def _served(sent: float = 0.0, tokens: int = 3) -> Served:
    return Served.at(sent, [sent + 0.5 + 0.1 * i for i in range(tokens)], tokens)


def _run(speed: float) -> LoadRun:
    return LoadRun(10 / speed, [_served(tokens=10)], 0.0)


def test_a_closed_loop_keeps_so_many_requests_open_and_answers_all() -> None:
    """Clients that wait for each other would measure one client; a request left out would make the run look fast."""
    server, planned = CountingServer(pause=0.01), [Request(0.0, [1], 2 + i % 3) for i in range(12)]
    run = closed_loop(server, planned, clients=4)
    assert server.most_open == 4 and len(server.came) == 12
    assert sorted(one.tokens for one in run.served) == sorted(request.new_tokens for request in planned)
    assert run.tokens_per_s == pytest.approx(36 / run.seconds)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """A slow server would be asked less, and its queue would not show (coordinated omission)."""
    server = CountingServer(pause=0.2)
    run = open_loop(server, [Request(0.01 * i, [1], 2) for i in range(8)])
    assert server.most_open == 8
    assert [one.sent_s for one in run.served] == pytest.approx([0.01 * i for i in range(8)])
    assert all(came >= request for came, request in zip(sorted(server.came), [0.01 * i for i in range(8)], strict=True))


def test_an_error_of_a_server_ends_the_run() -> None:
    """Requests that failed would be missing from the percentiles."""

    class Failing:
        def stream(self, request: Request) -> Iterator[None]:
            raise ArmError("out of memory")

    with pytest.raises(ArmError, match="out of memory"):
        closed_loop(Failing(), [Request(0.0, [1], 2)], 2)


def test_times_of_a_request() -> None:
    """Time to first token would count from the run's beginning, or the gap before the first token as one between tokens."""
    one = Served.at(2.0, [2.5, 2.6, 3.0], 3)
    assert (one.first_token_s, one.last_token_s) == pytest.approx((0.5, 1.0))
    assert one.gaps_s == pytest.approx((0.1, 0.4))


def test_percentiles() -> None:
    """A p99 of the sorted list's middle would look good."""
    assert percentiles(list(range(101))) == {50: 50, 95: 95, 99: 99}
    with pytest.raises(ValueError, match="no latencies"):
        percentiles([])


def test_latencies_are_those_of_all_tokens_in_milliseconds() -> None:
    """Gaps averaged by request would hide the one long stall of a request."""
    stalled = replace(_served(), gaps_s=(0.1, 1.0))
    row = latency_row(LoadRun(2.0, [_served(), stalled], 0.0))
    assert row["ttft_ms_p50"] == pytest.approx(500) and row["itl_ms_p50"] == pytest.approx(100)
    assert row["itl_ms_p99"] == pytest.approx(973) and row["tokens_per_s"] == 3.0


def test_capacity_leaves_out_the_end_when_clients_run_dry() -> None:
    """Loads of 95% would be of less, as the last requests run in little company."""
    assert capacity([_served(sent=float(s)) for s in (0, 0, 4, 4, 8, 8)], clients=2) == pytest.approx(4 / 8)
    with pytest.raises(ValueError, match="more requests than clients"):
        capacity([_served(), _served()], clients=2)


def test_ratios_are_paired_by_round() -> None:
    """A machine that slows down between rounds would decide: medians of each arm alone give 1 here."""
    rounds = [{"ours": _run(2.0), "theirs": _run(1.0)}, {"ours": _run(8.0), "theirs": _run(4.0)}, {"ours": _run(99.0)}]
    ratio = speed_ratio(rounds, "ours", "theirs")
    assert ratio is not None and ratio.median == pytest.approx(2.0)
    assert speed_ratio(rounds, "ours", "absent") is None
