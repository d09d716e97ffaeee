"""The documentation's section on the kit: what each stage found, or that it has not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tide_bench.tables import markdown_table as table

from benchmarks.gpu.kit.journal import FAILED, NOT_RUN
from benchmarks.gpu.kit.plan import STAGES

_MOST_REASONS = 12  # failed cases of a stage that are listed
Row = Mapping[str, Any]


def gpu_kit_table(run: Mapping[str, Any]) -> str:
    """From a run in docs/results."""
    machine = run["machine"]
    where = f"{run['date'][:10]}, {machine['gpu']}, CUDA driver {machine['driver']}, torch {machine['torch']}"
    rows = {row["stage"]: row for row in run["rows"]}
    parts = [_stages(where, rows), "\n".join(_findings(rows)), _router_table(rows.get(5)), _bullets(rows)]
    return "\n\n".join(part for part in parts if part)


def gpu_kit_not_run() -> str:
    """While there is no run."""
    return _stages("not run: no GPU has been at hand", {})


def _stages(where: str, rows: Mapping[int, Row]) -> str:
    lines = [f"**What the GPU kit found** ({where}).", ""]
    cells = [[str(stage.number), stage.title, *_cells(rows.get(stage.number))] for stage in STAGES]
    return "\n".join([*lines, *table(["stage", "what", "result", "cases", "seconds"], cells)])


def _cells(row: Row | None) -> list[str]:
    if row is None:
        return ["not run", "", ""]
    counts = row["counts"]
    words = [f"{counts['passed']} passed", *(f"{counts[state]} {state}" for state in (FAILED, NOT_RUN) if counts[state])]
    state = row["state"] if row["complete"] else f"{row['state']}, {sum(counts.values())} of {row['cases_planned']}"
    return [state, ", ".join(words), f"{row['seconds']:.0f}"]


def _findings(rows: Mapping[int, Row]) -> Iterator[str]:
    """What a captured cuBLAS call consists of: whether a library's graphs can be conditional hangs on it."""
    for case in rows.get(1, {"cases": []})["cases"]:
        if case["case"].startswith("cublas_") and "figures" in case:
            for shape, found in case["figures"].items():
                nodes = ", ".join(f"{count} {kind}" for kind, count in found["nodes"].items())
                arm = case["case"].removeprefix("cublas_")
                yield f"- cublasGemmEx {shape}, workspace {arm}: {nodes}; in a WHILE body: {found['in_while_body']}."


def _router_table(row: Row | None) -> str:
    cells = [_router_cells(case["figures"]) for case in (row or {"cases": []})["cases"] if "arms" in case.get("figures", {})]
    headings = ["router", "µs", "floor µs", "GB/s", "× eager", "× compile"]
    return "\n".join(["**The router's kernel** on the GPU, with a cold L2 cache.", "", *table(headings, cells)]) if cells else ""


def _router_cells(figures: Row) -> list[str]:
    ratios = [f"{figures[name]:.1f}" if name in figures else "–" for name in ("vs_eager", "vs_compile")]
    times = [f"{figures['arms']['tide']['gpu_us']:.1f}", f"{figures['floor_us']:.1f}", f"{figures['gb_s']:.0f}"]
    return [figures["problem"], *times, *ratios]


def _bullets(rows: Mapping[int, Row]) -> str:
    """Cases that failed, or could not run, with their reasons."""
    lines = []
    for number, row in rows.items():
        wrong = [case for case in row["cases"] if case["state"] in (FAILED, NOT_RUN)]
        for case in wrong[:_MOST_REASONS]:
            lines.append(f"- Stage {number}, {case['case']}, {case['state']}: {case['reason'].splitlines()[0][:300]}")
        if len(wrong) > _MOST_REASONS:
            lines.append(f"- Stage {number}: {len(wrong) - _MOST_REASONS} more.")
    return "\n".join(lines)
