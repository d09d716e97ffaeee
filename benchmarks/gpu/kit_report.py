"""What calls found, as a run in docs/results, and the documentation's table that is drawn from it.

python -m benchmarks.gpu.kit_report KIT.JSONL …
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tide_bench.report import Report
from tide_bench.tables import markdown_table

from benchmarks.gpu.gpu_report import executed
from benchmarks.gpu.kit.bare_image import ROOT
from benchmarks.gpu.kit.child import FAILED, NOT_RUN, PASSED
from benchmarks.gpu.kit.command import shown
from benchmarks.gpu.kit.plan import STAGES

Line = dict[str, Any]  # of kit.jsonl
_MOST_REASONS, _MOST_CHARACTERS = 12, 300


def write_report(paths: Sequence[Path]) -> None:
    """Write docs/results/DATE-gpu_kit.json from the lines in ``paths``, and the pages' tables. A later line of a case replaces an
    earlier one, whatever sources it is of: each row says of which its cases are."""
    lines = [json.loads(text) for path in paths for text in path.read_text(encoding="utf-8").splitlines()]
    report = kit_report([line for line in lines if not line["dry"]])
    path = ROOT / "docs" / "results" / f"{report.date[:10]}-gpu_kit.json"
    if path.exists():  # stages of an earlier run of that day which the plan still has and which were not run again
        waiting = STAGES.keys() - {row["stage"] for row in report.rows}
        report.rows += [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["stage"] in waiting]
    report.write(path)
    print(f"wrote {path}")
    subprocess.run([sys.executable, "-m", "benchmarks.tables"], cwd=ROOT, check=True)


def kit_report(lines: Sequence[Line]) -> Report:
    """A row for each stage, with its cases. Raises ValueError where no stage ran on a GPU."""
    if not lines:
        raise ValueError("no line is of a run on a GPU")
    newest = {(line["stage"], line["case"]): line for line in lines}
    report = Report("gpu_kit", targets=[], calls=sorted({line["call"] for line in lines}))
    report.date = max(line["date"] for line in lines)
    gpu = newest.get(("machine", "gpu"), {}).get("figures", {})
    versions = newest.get(("machine", "packages"), {}).get("figures", {}).get("versions", {})
    report.machine |= {"gpu": gpu.get("name", "unknown GPU"), "driver": gpu.get("driver", "unknown"), **versions}
    for stage in STAGES:
        cases = [line for (name, case), line in newest.items() if name == stage and case != "stage"]
        if cases:
            report.rows.append(_row(stage, cases, newest.get((stage, "stage"), {})))
            report.add(f"kit_{stage}_failed", sum(line["state"] == FAILED for line in cases))
    if any(row["stage"].startswith(("demo", "1b")) and row["counts"][PASSED] for row in report.rows):
        executed(report, "torch")
    return report


def _row(stage: str, cases: Sequence[Line], end: Mapping[str, Any]) -> dict[str, Any]:
    kept = [{key: line[key] for key in ("case", "state", "seconds", "reason", "figures") if line.get(key)} for line in cases]
    counts = {state: sum(line["state"] == state for line in cases) for state in (PASSED, FAILED, NOT_RUN)}
    sources = sorted({line["sources"] for line in cases})
    return {"stage": stage, "seconds": end.get("seconds", 0), "counts": counts, "sources": sources, "cases": kept}


def gpu_kit_table(run: Mapping[str, Any]) -> str:
    """From a run in docs/results."""
    machine = run["machine"]
    where = f"{run['date'][:10]}, {machine['gpu']}, CUDA driver {machine['driver']}, torch {machine['torch']}"
    rows = {row["stage"]: row for row in run["rows"]}
    parts = (_stages(where, rows), _decoding(rows), "\n".join(_findings(rows)), "\n".join(_wrong(rows)))
    return "\n\n".join(part for part in parts if part)


def gpu_kit_not_run() -> str:
    """While there is no run."""
    return _stages("not run: no GPU has been at hand", {})


def _stages(where: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    cells = [[name, *_cells(rows.get(name))] for name in STAGES]
    return "\n".join([f"**What the GPU kit found** ({where}).", "", *markdown_table(["stage", "cases", "seconds"], cells)])


def _cells(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return ["not run", ""]
    return [", ".join(f"{count} {state}" for state, count in row["counts"].items() if count), f"{row['seconds']:.0f}"]


_DECODING = ["model", "batch", "eager", "CUDA graph", "torch.compile", "TIDE full", "TIDE exact", "TIDE exit", "unlike eager"]


def _decoding(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """ms a token of the demo model and of models with random weights; nothing where neither was decoded."""
    cells = list[list[str]]()
    for name, row in rows.items():
        if not name.startswith(("demo_", "1b_")):
            continue
        found = {case["case"]: case["figures"] for case in row["cases"] if case["state"] == PASSED}
        if name.startswith("demo_"):
            cells += [_demo_cells(name, found, batch) for batch in (1, 8) if f"full_b{batch}" in found]
        elif "tide_full" in found:
            model, dtype, batch = name.split("_")
            arms = [_ms(found.get(arm)) for arm in ("hf_eager", "hf_graph", "hf_compile", "tide_full")]
            cells.append([f"{model}, {dtype}", batch.removeprefix("b"), *arms, "", _exit(found.get("tide_always_exits")), ""])
    if not cells:
        return ""
    caption = (
        "ms per token, target `torch`, greedy. `1b` has the shape of Llama-3.2-1B, random weights, and leaves at its first exit. "
        "Eager, CUDA graph and torch.compile are HuggingFace's model; eager waits for the processor that launches its kernels. "
        "Unlike eager: of 16 texts, those that leave it under `full` and under `exact`."
    )
    return "\n".join(["**Decoding on the GPU**: " + caption, "", *markdown_table(_DECODING, cells)])


def _demo_cells(name: str, found: Mapping[str, Any], batch: int) -> list[str]:
    eager = {"ms": found["eager"][f"b{batch}_ms"]} if "eager" in found else None
    full, exact, leaves = (found.get(f"{policy}_b{batch}") for policy in ("full", "exact", "exit"))
    unlike = [str(arm["texts_that_differ"]) for arm in (full, exact) if arm and "texts_that_differ" in arm]
    return [name.replace("_", ", "), str(batch), _ms(eager), "", "", _ms(full), _ms(exact), _exit(leaves), ", ".join(unlike)]


def _ms(figures: Mapping[str, Any] | None) -> str:
    return f"{figures['ms']:.2f}" if figures else ""


def _exit(figures: Mapping[str, Any] | None) -> str:
    return f"{figures['ms']:.2f} ({figures['mean_depth']:.1f} layers)" if figures else ""


def _findings(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What kernels take and whether their bits agree, one line a case."""
    for name, row in rows.items():
        if name != "torch_kernels":
            continue
        for case in row["cases"]:
            if case["state"] == PASSED and case.get("figures"):
                yield f"- {name}, {case['case']}: {shown(case['figures'])[:_MOST_CHARACTERS]}"


def _wrong(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Cases that failed, or could not run, with their reasons."""
    for name, row in rows.items():
        wrong = [case for case in row["cases"] if case["state"] in (FAILED, NOT_RUN)]
        for case in wrong[:_MOST_REASONS]:
            yield f"- {name}, {case['case']}, {case['state']}: {case['reason'].splitlines()[0][:_MOST_CHARACTERS]}"
        if len(wrong) > _MOST_REASONS:
            yield f"- {name}: {len(wrong) - _MOST_REASONS} more."


if __name__ == "__main__":
    write_report([Path(name) for name in sys.argv[1:]])
