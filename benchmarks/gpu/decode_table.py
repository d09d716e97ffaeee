"""The documentation's table of the GPU decode benchmark; cells without a run are marked as such."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tide_bench.tables import markdown_table as table

from benchmarks.gpu.decode_cases import ARMS, DecodeCase, decode_cases
from benchmarks.gpu.decode_promises import complaints
from benchmarks.gpu.model_shapes import SHAPES

NOT_RUN, COULD_NOT = "not run", "could not run"
Row = dict[str, Any]
# Title → what of a row: TIDE's speed, its ratios, and what of its time the host takes.
_FURTHER: dict[str, Callable[[Row], str]] = {
    "tokens/s of full": lambda row: f"{row['arms']['tide']['tokens_per_s']:.0f}",
    "× eager": lambda row: f"{row['vs_eager']:.2f}",
    "× compile": lambda row: f"{row['vs_compile']:.2f}",
    "exact × full": lambda row: f"{row['exact_vs_full']:.2f}",
    "time ÷ unsplit": lambda row: f"{row['over_unsplit']:.3f}",
    "host ms": lambda row: f"{row['arms']['tide']['host_ms_per_token']:.3f}",
}


def decode_cuda_table(run: Mapping[str, Any]) -> str:
    """From a run in docs/results; cases that it left out are not run."""
    machine = run["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("onnxruntime", "torch"))
    return _table(f"{run['date'][:10]}, {machine['gpu']}, {versions}", run["rows"])


def decode_cuda_not_run() -> str:
    """While there is no run."""
    return _table("not run: no GPU has been at hand", [])


def _table(where: str, rows: Sequence[Row]) -> str:
    measured = {tuple(row[name] for name in ("model", "dtype", "batch")): row for row in rows}
    lines = [
        "**Decode speed on a GPU**, target `cuda`, greedy, ms per step; all models but `demo` have random weights "
        f"(`benchmarks/gpu/decode_cuda.py`: {where}).",
        "",
    ]
    cells = []
    for case in _cases(rows):
        row = measured.get(tuple(case.key.values()))
        figures = (*(_cell(row, arm) for arm in ARMS), *(_further(row, title) for title in _FURTHER))
        cells.append([*map(str, case.key.values()), *figures])
    lines += table(["model", "dtype", "batch", *ARMS.values(), *_FURTHER], cells)
    notes = [note for case in _cases(rows) for note in _notes(case, measured.get(tuple(case.key.values())))]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cases(rows: Sequence[Row]) -> list[DecodeCase]:
    """The default ones, and those of ``rows`` besides."""
    further = [DecodeCase(SHAPES[row["model"]], row["dtype"], row["batch"]) for row in rows]
    return list(dict.fromkeys([*decode_cases(), *further]))


def _cell(row: Row | None, arm: str) -> str:
    if row is None:
        return NOT_RUN
    figures = row["arms"].get(arm)
    if figures is None:
        return "–"
    return COULD_NOT if "note" in figures else f"{figures['ms_per_token']:.3f}"


def _further(row: Row | None, title: str) -> str:
    """A dash where one of the arms that it compares could not run."""
    if row is None:
        return NOT_RUN
    try:
        return _FURTHER[title](row)
    except KeyError:
        return "–"


def _notes(case: DecodeCase, row: Row | None) -> list[str]:
    if row is None:
        return []
    failed = [f"{ARMS[arm]} {COULD_NOT}: {figures['note']}" for arm, figures in row["arms"].items() if "note" in figures]
    return [f"- {case.shape.name}, {case.dtype}, batch {case.rows}: {line}." for line in (*failed, *complaints(row))]
