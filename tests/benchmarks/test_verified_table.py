"""The table of what was verified how claims no more than the runs show."""

from __future__ import annotations

from pathlib import Path

import pytest
from tide_bench.report import Report

from benchmarks.gpu.gpu_report import executed, gpu_report
from benchmarks.verified_table import NOT_YET, verified_table


def write(folder: Path, date: str, report: Report, rows: list[dict[str, object]] | None = None) -> None:
    """As a benchmark does that ran on a given day, on a CPU of a known name."""
    report.date, report.rows = f"{date}T10:00:00+00:00", rows or []
    report.machine["cpu"] = "a CPU"
    report.write(folder / f"{date}-{report.benchmark}.json")


def on_h200(benchmark: str, *targets: str) -> Report:
    report = gpu_report(benchmark, "H200", models="demo")
    for target in targets:
        executed(report, target)
    return report


def row_of(table: str, target: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if f"`{target}`" in line]
    return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.mark.parametrize("target", ["cpu", "cuda", "torch", "rtx-sm_89", "rtx-ampere+", "trt-sm_70", "trt-sm_90"])
def test_without_runs_nothing_was_executed_compiled_or_checked(tmp_path, target):
    """Breaks: the README claims what was never run."""
    assert all(cell in (NOT_YET, "nothing to compile", "–") for cell in row_of(verified_table(tmp_path), target))


def test_evidence_lands_at_its_target_only(tmp_path):
    """A V100 would be shown as executed because an H200 was, or RTX engines as checked by TensorRT's bindings."""
    write(tmp_path, "2026-11-20", Report("decode_cpu", models="demo"))
    write(tmp_path, "2026-11-21", on_h200("decode_loop", "trt-sm_90"))
    write(tmp_path, "2026-11-22", Report("built_engines"), [{"target": "rtx-sm_89", "tool": "tensorrt-rtx 1.7.1"}])
    versions = {"tensorrt": ["11.4.0", "10.4.0"], "tensorrt_rtx": ["1.7.1"]}
    rows = [{"package": p, "version": v, "uses": 7, "problems": int(v == "10.4.0")} for p in versions for v in versions[p]]
    write(tmp_path, "2026-11-22", Report("api_conformance"), rows)
    table = verified_table(tmp_path)
    assert row_of(table, "cpu") == ["yes: a CPU, 2026-11-20", "nothing to compile", "–"]
    assert row_of(table, "cuda")[0] == NOT_YET
    assert row_of(table, "torch") == [NOT_YET, "nothing to compile", "–"]
    assert row_of(table, "rtx-sm_89") == [NOT_YET, "yes: tensorrt-rtx 1.7.1, 2026-11-22", "yes: 7 uses in 1.7.1, 2026-11-22"]
    assert row_of(table, "rtx-sm_86")[:2] == [NOT_YET, NOT_YET]
    assert row_of(table, "trt-sm_90") == ["yes: H200, 2026-11-21", NOT_YET, "yes: 7 uses in 11.4.0, 2026-11-22"]
    assert row_of(table, "trt-sm_70") == [NOT_YET] * 3  # its API has a problem


def test_a_run_on_a_gpu_is_not_one_of_the_cpu(tmp_path):
    """`cuda` would stay "not yet" after it has run, and `cpu` get the date of a run that it had no part in."""
    write(tmp_path, "2026-11-20", Report("decode_cpu", models="demo"))
    write(tmp_path, "2026-11-21", on_h200("decode_cuda", "cuda"))
    table = verified_table(tmp_path)
    assert row_of(table, "cuda")[0] == "yes: H200, 2026-11-21"
    assert row_of(table, "cpu")[0] == "yes: a CPU, 2026-11-20"


@pytest.mark.parametrize("report", [on_h200("decode_cuda"), on_h200("kernel_cases"), Report("router_kernel", models="demo")])
def test_a_run_on_a_gpu_that_names_no_target_executed_none(tmp_path, report):
    """Kernels by themselves, arms that all failed, or a script that names no target would count as the CPU's targets."""
    write(tmp_path, "2026-11-21", report)
    table = verified_table(tmp_path)
    assert row_of(table, "cuda")[0] == row_of(table, "cpu")[0] == NOT_YET
