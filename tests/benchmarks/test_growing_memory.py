"""The check of memory that grows, over host memory that grows."""

from __future__ import annotations

import pytest
from runtime.host_device import HostDevice, HostReserved

from benchmarks.gpu.growing_memory import findings

SIZES = {"block": HostReserved.granule // 2, "row": HostReserved.granule}


def test_memory_that_behaves_passes() -> None:
    """Guards against a check that fails on every GPU."""
    found = findings(HostDevice(), **SIZES)
    assert len(found) > 8 and all(value for value in found.values() if isinstance(value, bool))


def test_memory_that_is_zeroed_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a check that passes where keys and values are lost."""
    provide = HostReserved.provide

    def forgetful(memory: HostReserved, ranges: list[tuple[int, int]]) -> None:
        provide(memory, ranges)
        for begin, end in ranges:
            memory._granules[begin // memory.granule : -(-end // memory.granule)] = 0

    monkeypatch.setattr(HostReserved, "provide", forgetful)
    assert not findings(HostDevice(), **SIZES)["growth_keeps_contents"]
