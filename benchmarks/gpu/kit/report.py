"""The kit's results as runs in docs/results, from which the tables of the documentation are drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tide_bench.report import Report

from benchmarks.gpu.decode_cases import DecodeCase, decode_cases
from benchmarks.gpu.decode_cuda import TARGET, compare_tokens
from benchmarks.gpu.decode_cuda import record as record_decode
from benchmarks.gpu.gpu_report import executed
from benchmarks.gpu.kit.bare_image import ROOT
from benchmarks.gpu.kit.journal import FAILED, NOT_RUN, PASSED
from benchmarks.gpu.kit.plan import STAGES

Content = dict[str, Any]  # of a stage's file
Case = dict[str, Any]  # of its ``cases``


def write_report(out: Path) -> None:
    """Write docs/results/DATE-gpu_kit.json and DATE-decode_cuda.json from the stages in ``out``, and the pages' tables.

    Without stages that ran on a GPU only the tables are written, which then say so.
    """
    stages = [content for content in _read(out) if not content["dry"]]
    if not stages:
        print(f"not run: {out} holds no results of a GPU")
    for report in _reports(stages) if stages else ():
        path = ROOT / "docs" / "results" / f"{report.date[:10]}-{report.benchmark}.json"
        report.write(path)
        print(f"wrote {path}")
    subprocess.run([sys.executable, "-m", "benchmarks.tables"], cwd=ROOT, check=True)


def _read(out: Path) -> Iterator[Content]:
    for stage in STAGES:
        path = out / stage.file_name
        if path.exists():
            yield json.loads(path.read_text(encoding="utf-8"))


def _reports(stages: list[Content]) -> list[Report]:
    reports = [kit_report(stages)]
    decode = next((content for content in stages if STAGES[content["stage"]].module == "decode"), None)
    if decode is not None and any(case["state"] == PASSED for case in decode["cases"]):
        reports.append(decode_report(decode, reports[0].machine))
    return reports


def kit_report(stages: list[Content]) -> Report:
    """A row for each stage, with its cases' figures, and what was executed. Logs and tokens are left out."""
    report = _report("gpu_kit", stages[-1], commits=sorted({content["commit"] for content in stages}))
    report.machine |= {"gpu": _gpu(stages), "driver": _figure(stages, 0, "gpu", "driver") or "unknown"}
    for content in stages:
        counts = {state: sum(case["state"] == state for case in content["cases"]) for state in (PASSED, FAILED, NOT_RUN)}
        facts = {name: content[name] for name in ("stage", "title", "state", "complete", "seconds", "cases_planned")}
        report.rows.append(facts | {"counts": counts, "cases": [_short(case) for case in content["cases"]]})
        report.add(f"kit_stage{content['stage']}_failed", counts[FAILED])
        for target in _executed(content["cases"]):
            executed(report, target)
    report.add("kit_minutes", sum(content["seconds"] for content in stages) / 60)
    return report


def _short(case: Case) -> Case:
    """Without what only finding a mistake needs, and without passed kernel cases' empty figures."""
    kept = {name: case[name] for name in ("case", "state", "reason", "figures") if case.get(name)}
    if "figures" in kept:
        kept["figures"] = {name: value for name, value in kept["figures"].items() if name != "tokens"}
    return kept


def _executed(cases: Iterable[Case]) -> Iterator[str]:
    """Targets whose bundles generated on the GPU."""
    for case in cases:
        if case["state"] == PASSED:
            if case["case"].endswith(("_tide", "_exact", "_unsplit")) and "tokens" in case["figures"]:
                yield TARGET
            if "target" in case["figures"]:
                yield case["figures"]["target"]


def decode_report(content: Content, machine: dict[str, Any]) -> Report:
    """Stage 6 as a run of `benchmarks.gpu.decode_cuda`."""
    report = _report("decode_cuda", content)
    report.machine = machine
    by_name = {case["case"]: case for case in content["cases"]}
    for case in decode_cases():
        arms = {arm: _arm(by_name[f"{case.name}_{arm}"]) for arm in case.arms if f"{case.name}_{arm}" in by_name}
        if arms.get("tide") is not None:
            _record(report, case, arms)
    return report


def _record(report: Report, case: DecodeCase, arms: dict[str, dict[str, Any]]) -> None:
    compare_tokens(arms)
    record_decode(report, case, arms)


def _arm(case: Case) -> dict[str, Any]:
    return dict(case["figures"]) if case["state"] == PASSED else {"note": case["reason"].splitlines()[0]}


def _report(benchmark: str, content: Content, **settings: Any) -> Report:
    report = Report(benchmark, targets=[], **settings)
    report.date, report.machine = content["date"], dict(content["machine"])
    return report


def _gpu(stages: list[Content]) -> str:
    return str(_figure(stages, 0, "gpu", "name") or "unknown GPU")


def _figure(stages: list[Content], stage: int, case: str, name: str) -> Any:
    """A figure of a case, None where it was not measured."""
    found = (c for content in stages if content["stage"] == stage for c in content["cases"] if c["case"] == case)
    return next((c["figures"].get(name) for c in found if c["state"] == PASSED), None)
