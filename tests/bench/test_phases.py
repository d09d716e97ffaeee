"""Where the time went."""

from __future__ import annotations

import pytest
from tide_bench import report as phases
from tide_bench.report import Phases, phase_lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time is its only entry."""
    now = [0.0]
    monkeypatch.setattr(phases, "perf_counter", lambda: now[0])
    return now


def test_parts_add_up_longest_first(clock: list[float]) -> None:
    """A user would not see which arm the minutes go to."""
    lines: list[str] = []
    timed = Phases(lines.append)
    for part, seconds in (("eager", 1.0), ("compile", 5.0), ("eager", 2.0)):
        with timed("check", part):
            clock[0] += seconds
    with timed("curve"):
        clock[0] += 4
    assert phase_lines(timed.seconds) == ["check 8.0 s: compile 5.0, eager 3.0", "curve 4.0 s"]
    assert lines == ["check: eager", "check: compile", "check: eager", "curve"]
