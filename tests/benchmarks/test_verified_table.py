"""The table of what was verified how says no more than the runs do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.verified_table import NOT_YET, verified_table

CPU = {"date": "2026-11-20T10:00:00+00:00", "machine": {"cpu": "a CPU"}}


def write(folder: Path, date: str, benchmark: str, **parts: object) -> None:
    run = CPU | {"date": f"{date}T10:00:00+00:00", "benchmark": benchmark, "settings": {}, "rows": []} | parts
    (folder / f"{date}-{benchmark}.json").write_text(json.dumps(run))


def row_of(table: str, target: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if f"`{target}`" in line]
    return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.mark.parametrize("target", ["cpu", "cuda", "rtx-sm_89", "rtx-ampere+", "trt-sm_70", "trt-sm_90"])
def test_without_runs_nothing_was_executed_compiled_or_checked(tmp_path, target):
    """The README would claim what nobody has seen."""
    assert all(cell in (NOT_YET, "nothing to compile", "–") for cell in row_of(verified_table(tmp_path), target))


def test_evidence_lands_at_its_target_only(tmp_path):
    """A V100 would be shown as executed because an H200 was, or RTX engines as checked by TensorRT's bindings."""
    write(tmp_path, "2026-11-20", "decode_cpu")
    write(tmp_path, "2026-11-21", "decode_cuda", settings={"targets": ["trt-sm_90"]}, machine={"cpu": "a CPU", "gpu": "H200"})
    write(tmp_path, "2026-11-22", "built_engines", rows=[{"target": "rtx-sm_89", "tool": "tensorrt-rtx 1.7.1"}])
    versions = {"tensorrt": ["11.4.0", "10.4.0"], "tensorrt_rtx": ["1.7.1"]}
    rows = [{"package": p, "version": v, "uses": 7, "problems": int(v == "10.4.0")} for p in versions for v in versions[p]]
    write(tmp_path, "2026-11-22", "api_conformance", rows=rows)
    table = verified_table(tmp_path)
    assert row_of(table, "cpu") == ["yes: a CPU, 2026-11-20", "nothing to compile", "–"]
    assert row_of(table, "cuda")[0] == NOT_YET
    assert row_of(table, "rtx-sm_89") == [NOT_YET, "yes: tensorrt-rtx 1.7.1, 2026-11-22", "yes: 7 uses in 1.7.1, 2026-11-22"]
    assert row_of(table, "rtx-sm_86")[:2] == [NOT_YET, NOT_YET]
    assert row_of(table, "trt-sm_90") == ["yes: H200, 2026-11-21", NOT_YET, "yes: 7 uses in 11.4.0, 2026-11-22"]
    assert row_of(table, "trt-sm_70") == [NOT_YET] * 3  # its API has a problem
