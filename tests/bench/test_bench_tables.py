"""Tables of runs: those of tide-bench, from synthetic rows, and what the documentation shows of any."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
from bench.synthetic_runs import row
from benchmarks import tables
from tide_bench.report import Report
from tide_bench.results import Columns, add_results, add_tables
from tide_bench.tables import where


def test_every_row_has_a_cell_for_every_heading() -> None:
    """Columns of the tables would slip."""
    failed = {"arm": "genai", "title": "genai", "batch": 1, "prompt_tokens": 8, "note": "no wheel"}
    for mode, gpu in product(("decode", "prefill"), (False, True)):
        columns = Columns(mode, ("eager", "cuda-graph", "unsplit"), gpu)
        assert {len(columns.cells(r)) for r in (row("full", 1.0, rank=1), failed)} == {len(columns.headings)}


def test_a_table_shows_why_an_arm_is_not_ranked() -> None:
    """README would show a speed that was bought with another text."""
    report = Report("tide_bench", mode="decode", model="tiny", new_tokens=8, baselines=("eager", "unsplit"), device="cpu")
    report.rows = [row("full", 1.0, rank=1), row("exit", 3.0, mark="its thresholds are not certified")]
    add_tables(report)
    (table,) = report.tables
    assert table.rows[1][:2] == ["–", "<exit>"] and table.faint == [1]
    assert "- <exit>: its thresholds are not certified" in table.markdown("today, here")


def test_a_gpus_table_shows_its_memory_its_baseline_and_what_drove_decoding() -> None:
    """The processor's memory would be taken for the GPU's, or single steps for a loop on the device."""
    report = Report("tide_bench", mode="decode", model="tiny", new_tokens=8, baselines=("eager", "cuda-graph"), device="cuda")
    full = row("full", 2.0, rank=1, gpu_mib=700.0, drive="device-driven, 16 tokens a launch", as_eager=0.5)
    full |= {f"vs_cuda-graph{end}": 1.5 for end in ("", "_low", "_high")}
    report.rows = [full, {"arm": "compile", "title": "compile", "batch": 1, "prompt_tokens": 8, "note": "no compiler"}]
    add_tables(report)
    add_results(report)
    cells = dict(zip(report.tables[0].headings, report.tables[0].rows[0], strict=True))
    assert cells["GPU memory"] == "700 MiB" and cells["× cuda-graph (95%)"].startswith("1.50") and cells["as eager"] == "50.0%"
    assert "<full>: device-driven, 16 tokens a launch" in report.tables[0].notes
    assert report.results["full_vs_cuda_graph_b1"] == 1.5 and report.results["bench_device_arms"] == 1


def test_a_row_that_lacks_a_cell_is_refused() -> None:
    """Its figures would stand under the headings of others."""
    with pytest.raises(ValueError, match="a cell for each"):
        Report("tide_bench").table("speed", ["arm", "tokens/s"], [["full"]])


def test_pages_show_the_cells_that_the_terminal_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The documentation would show figures that no run has printed, or those of an older run."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for date, speed in (("2026-01-01", "7.5"), ("2026-01-02", "8.5")):
        report = Report("restart")
        report.table("Speed", ["arm", "tokens/s"], [["full | greedy", speed]], "Medians.", ["A note."])
        report.statement("Second", f"it took {speed} s.")
        report.date = f"{date}T00:00:00+00:00"
        report.finish(tmp_path / f"{date}-restart.json")
    assert "8.5" in capsys.readouterr().out
    first, second = tables.run_tables("restart", brief=False)
    assert first.startswith(f"**Speed** ({where(json.loads((tmp_path / '2026-01-02-restart.json').read_text()))}): Medians.")
    assert "| full \\| greedy | 8.5 |" in first and first.endswith("- A note.")
    assert second == "**Second**: it took 8.5 s."
    marked = "Before.\n<!-- tables: restart model_swap -->\nold\n<!-- /tables -->\nAfter."
    absent = "No run of `benchmarks.model_swap` is published yet."
    assert tables.with_tables(marked) == marked.replace("old", "\n\n".join([first, second, absent]))


def test_brief_pages_show_what_users_choose_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README would list every variant, or lack one of those that its text is about."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    columns = tables.BRIEF["integer_products_amd"][3]
    report = Report("integer_products_amd")
    report.table(
        "Speed",
        [*columns, "more"],
        [[arm, "8.5", "2", "3", "b", "9"] for arm in ("TIDE w8a8", "TIDE source", "llama.cpp, the file")],
    )
    report.finish(tmp_path / "2026-01-01-integer_products_amd.json")
    (brief,) = tables.run_tables("integer_products_amd", brief=True)
    rows = [line for line in brief.splitlines() if line.startswith("| TIDE") or line.startswith("| llama")]
    assert rows == ["| TIDE w8a8 | 8.5 | 2 | 3 | b |", "| llama.cpp, the file | 8.5 | 2 | 3 | b |"] and len(columns) <= 6


def test_figures_of_a_text_are_of_one_machine() -> None:
    """README names one machine below its figures, and another one where it is meant; one of them would be another's."""
    used = set(re.findall(r"\{(\w+)\[", tables.FIGURES["README"])) - {"tasks_avx2", "certainty"}
    machines = [run["machine"] for run in map(tables.latest, used) if run is not None]
    assert len(machines) == len(used) > 3 and len({(m["cpu"], m["instructions"], m["cores"]) for m in machines}) == 1


def test_every_table_names_the_instruction_sets() -> None:
    """A reader with an AVX2 laptop would expect the speed of a server with AVX512."""
    machine: dict[str, object] = {
        "cpu": "AMD EPYC",
        "instructions": "SSE4.1 AVX AVX2",
        "cores": 2,
        "onnxruntime": "1.32.0",
        "torch": "2.13.0",
    }
    run = {"date": "2026-11-27T00:00:00+00:00", "machine": machine}
    assert "AMD EPYC, SSE4.1 AVX AVX2, 2 cores" in where(run)
    del machine["instructions"]
    assert "AMD EPYC, 2 cores" in where(run)  # earlier runs did not note them
