"""What scripts and pages read from a benchmark: RESULT lines, the JSON file, and where the time went."""

import json
import re
from pathlib import Path

import pytest
from tide_bench import report as phases
from tide_bench.report import Phases, Report, machine, phase_lines


@pytest.fixture
def report() -> Report:
    report = Report("decode_cpu", models="demo", repeats=3)
    report.add("demo_full_vs_genai_b1", 1.23456)
    report.add("1b_full_vs_genai_b8", 0.99999)
    report.add("steps", 12)
    report.rows.append({"arm": "genai", "note": "could not run: no wheel", "agreement": None})
    return report


def test_result_lines_are_name_equals_number(report: Report) -> None:
    assert report.result_lines() == [
        "RESULT demo_full_vs_genai_b1=1.235",
        "RESULT 1b_full_vs_genai_b8=1",
        "RESULT steps=12",
    ]


def test_finish_prints_the_machine_and_every_result(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report.finish()
    printed = capsys.readouterr().out.splitlines()
    assert printed[1:] == report.result_lines()
    assert "onnxruntime-genai" in printed[0] and report.date in printed[0]
    assert all(re.fullmatch(r"RESULT \w+=[-+.\de]+", line) for line in printed[1:])


def test_json_holds_unrounded_results_rows_settings_and_machine(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    report.finish(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["benchmark"] == "decode_cpu"
    assert content["results"]["demo_full_vs_genai_b1"] == 1.23456
    assert content["rows"] == report.rows
    assert content["settings"] == {"models": "demo", "repeats": 3}
    assert content["machine"] == report.machine


def test_machine_names_cpu_cores_and_versions() -> None:
    facts = machine()
    assert str(facts["instructions"]).split()[0] in ("SSE4.1", "NEON"), "kernels, and so texts, differ by instruction sets"
    assert facts["cpu"] and isinstance(facts["cores"], int) and facts["cores"] >= 1
    assert re.match(r"\d+\.\d+|not installed", str(facts["onnxruntime"]))


@pytest.mark.parametrize("name", ["", "with space", "a=b", "tokens/s"])
def test_a_name_that_breaks_the_line_is_refused(report: Report, name: str) -> None:
    with pytest.raises(ValueError, match="result name"):
        report.add(name, 1.0)


def test_a_figure_is_given_once_and_is_a_number(report: Report) -> None:
    with pytest.raises(ValueError, match="twice"):
        report.add("steps", 13)
    with pytest.raises(ValueError, match="not measured"):
        report.add("speed", float("nan"))


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
