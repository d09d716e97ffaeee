"""The documentation's table of the GPU decode benchmark: figures where a run measured them, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.gpu import decode_cuda
from benchmarks.gpu.decode_cases import ARMS, decode_cases
from benchmarks.gpu.decode_table import NOT_RUN, decode_cuda_not_run, decode_cuda_table
from benchmarks.gpu.gpu_report import gpu_report


def cells(table: str) -> dict[tuple[str, ...], list[str]]:
    """(Model, dtype, batch) → the cells of the arms."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    return {tuple(line[:3]): line[3:] for line in lines[1:]}


def test_cells_without_a_run_are_marked() -> None:
    """A missing table reads as if speed on GPUs were beside the point."""
    found = cells(decode_cuda_not_run())
    assert len(found) == len(list(decode_cases())) == 10
    assert all(line == [NOT_RUN] * len(line) and len(line) > len(ARMS) for line in found.values())
    assert "not run: no GPU" in decode_cuda_not_run()


def test_a_run_fills_the_cells_that_it_measured(tmp_path: Path) -> None:
    """A figure would stand beside another model, and an arm that failed look like one that was not tried."""
    report = gpu_report("decode_cuda", "H200")
    case = next(case for case in decode_cases("8b", "8") if case.name == "8b_bf16_b8")  # not among the default cases
    figures = {"ms_per_token": 4.0, "tokens_per_s": 2000.0, "as_eager": 1.0}
    arms = {"eager": figures, "compile": {"note": "OutOfMemoryError: 3 GiB"}, "unsplit": figures}
    arms |= {"tide": figures | {"ms_per_token": 5.0, "host_ms_per_token": 0.25}, "exact": figures | {"ms_per_token": 2.5}}
    decode_cuda.record(report, case, arms)
    report.write(tmp_path / "run.json")
    table = decode_cuda_table(json.loads((tmp_path / "run.json").read_text()))
    found = cells(table)
    assert found.pop(("8b", "bf16", "8")) == [
        *("4.000", "4.000", "5.000", "2.500", "could not run"),
        *("2000", "0.80", "–", "2.00", "1.250", "0.250"),
    ]
    assert all(line == [NOT_RUN] * len(line) for line in found.values())
    assert "H200" in table and "- 8b, bf16, batch 8: HF torch.compile could not run: OutOfMemoryError: 3 GiB." in table
    assert "segments take at most 1.03 times the unsplit graph's time; it is 1.250" in table


def test_the_page_shows_it_with_and_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a run the page would lose its table, as those of other benchmarks do."""
    page, text = "docs/targets.md", f"before\n{tables.START}\nold\n{tables.END}\nafter\n"
    for run, where in ((None, "not run: no GPU"), ({"date": "2026-11-22", "rows": []}, "2026-11-22, H200")):
        run = run and run | {"machine": {"gpu": "H200", "driver": 13000, "onnxruntime": "1", "torch": "2"}}
        monkeypatch.setattr(tables, "latest", lambda name, run=run: run)
        made = tables.with_tables(page, text)
        assert where in made and "old" not in made and made.startswith("before") and made.endswith("after\n")
