"""Joules from the counters that Linux shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from tide_bench.counters import EnergyMeter


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """One processor package, and a part of it that must not be counted again."""
    for name in ("intel-rapl:0", "intel-rapl:0:0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text("900")
        (tmp_path / name / "max_energy_range_uj").write_text("1000")
    return tmp_path / "intel-rapl:0"


def test_a_counter_that_starts_again_goes_on_counting(package: Path) -> None:
    """An arm that ran while the counter turned over would have produced energy."""
    meter = EnergyMeter(package.parent)
    before = meter.joules()
    (package / "energy_uj").write_text("100")
    after = meter.joules()
    assert before is not None and after is not None and after - before == pytest.approx(200e-6)


def test_a_machine_without_counters_gives_the_reason(tmp_path: Path) -> None:
    """An empty column would be taken for zero."""
    meter = EnergyMeter(tmp_path)
    assert meter.joules() is None and "no RAPL counters" in meter.absent
