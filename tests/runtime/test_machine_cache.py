"""Results of measurements, kept between processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tide_runtime import machine_cache
from tide_runtime.machine_cache import kept_result, queued_seconds


def measured_twice(folder: Path, max_queued: float) -> list[int]:
    """What two calls return where every measurement gives another number."""
    numbers = iter(range(2))
    return [kept_result("n", ["k"], lambda: next(numbers), int, int, folder, max_queued) for _ in range(2)]


@pytest.mark.parametrize(("queued", "found"), [(0.0, [0, 0]), (10.0, [0, 1])])
def test_what_was_measured_on_a_busy_machine_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queued: float, found: list[int]
) -> None:
    """One disturbed first load would make every later engine draft by wrong costs: int4 replies were 14% slower with them."""
    waited: Iterator[float] = iter([0.0, queued, 0.0, queued])
    monkeypatch.setattr(machine_cache, "queued_seconds", lambda: next(waited))
    assert measured_twice(tmp_path, max_queued=0.1) == found


def test_results_that_load_does_not_change_are_kept_whatever_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = iter(range(10))
    monkeypatch.setattr(machine_cache, "queued_seconds", lambda: float(next(waited)))
    assert measured_twice(tmp_path, max_queued=float("inf")) == [0, 0]


def test_waiting_for_a_core_is_counted_and_never_falls() -> None:
    """Where the counter could not be read, nothing would ever be found disturbed."""
    before = queued_seconds()
    assert 0 <= before <= queued_seconds()
