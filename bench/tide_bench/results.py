"""What a comparison shows: a table for each place, and named figures, both made of its rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tide_bench.report import Report

Row = Mapping[str, Any]
BUSY = 0.05  # share of the CPU that other processes may take without a note

_WORDS = (
    "ms per token: one more token for every row; ×: speed over the baseline, median of neighbouring turns; layers: launched; "
    "as `full`, as eager: share of tokens up to the first difference; "
)
_MEMORY = (
    "memory: the most its process had resident, a page of weights once for each graph that maps it; ",
    "GPU memory: what its process holds, its CUDA context included; torch's arms are timed by events, TIDE's until the host has "
    "the tokens; ",
)
_RANK = "no rank: its text is not what it promises"


@dataclass(frozen=True)
class Columns:
    """The columns of a table.

    Args:
        mode: of the comparison.
        baselines: over which ratios are shown.
        gpu: whether the arms ran on a GPU.
    """

    mode: str
    baselines: Sequence[str] = ("eager", "unsplit")
    gpu: bool = False

    @property
    def headings(self) -> list[str]:
        ratios = [f"× {baseline} (95%)" for baseline in self.baselines]
        memory = ["GPU memory" if self.gpu else "memory"]
        if self.mode == "prefill":
            return ["", "arm", "first token (p10–p90)", *ratios, *memory]
        speed = ["", "arm", "ms per token (p10–p90)", "tokens/s", "first token"]
        return [*speed, *ratios, "layers/token", "as `full`", "as eager", *memory]

    @property
    def caption(self) -> str:
        return _WORDS + _MEMORY[self.gpu] + _RANK

    def cells(self, row: Row) -> list[str]:
        """One row; missing figures are empty; an arm that could not run is marked."""
        rank = str(row["rank"]) if "rank" in row else "–"
        if "rounds" not in row:
            return [rank, row["title"], "could not run", *[""] * (len(self.headings) - 3)]
        ratios = [ratio_cell(row, baseline) for baseline in self.baselines]
        memory = [_number(row, "gpu_mib" if self.gpu else "peak_mib", ".0f", " MiB")]
        if self.mode == "prefill":
            return [rank, row["title"], spread_cell(row, "first_token_ms", " ms"), *ratios, *memory]
        speed = [spread_cell(row, "ms_per_token"), f"{row['tokens_per_s']:.0f}", f"{row['first_token_ms']:.0f} ms"]
        texts = [_number(row, name, ".1%") for name in ("agreement", "as_eager")]
        return [rank, row["title"], *speed, *ratios, _number(row, "layers_per_token", ".1f"), *texts, *memory]


def add_tables(report: Report) -> None:
    """A table for every place where arms were compared. ``report``: has the comparison's settings and rows."""
    settings = report.settings
    columns = Columns(settings["mode"], settings["baselines"], settings["device"] != "cpu")
    what = f"tide-bench, {columns.mode}: {settings['model']}, {settings['new_tokens']} new tokens per sequence"
    for number, (place, rows) in enumerate(places(report.rows).items()):
        marked = [index for index, row in enumerate(rows) if row.get("mark") or "note" in row]
        shown = [columns.cells(row) for row in rows]
        caption = "" if number else columns.caption
        report.table(f"{what}, {place}", columns.headings, shown, caption, _notes(rows), marked)


def _notes(rows: Sequence[Row]) -> list[str]:
    """Why arms have no rank, or could not run, each reason once; and whether the machine was busy."""
    marked = [f"{row['title']}: {row['mark']}" for row in rows if row.get("mark")]
    failed = [f"{row['title']} could not run: {row['note']}" for row in rows if "note" in row]
    load = max((row.get("other_load", 0.0) for row in rows), default=0.0)
    busy = [f"Other processes took {load:.0%} of the CPU meanwhile."] if load > BUSY else []
    driven = [f"{row['title']}: {row['drive']}" for row in rows if "drive" in row]
    return list(dict.fromkeys([*failed, *marked, *driven, *busy]))


def places(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by where they were measured, in words."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"batch {row['batch']}, {row['prompt_tokens']} prompt tokens", []).append(row)
    return found


def ratio_cell(row: Row, baseline: str) -> str:
    name = f"vs_{baseline}"
    if name not in row:
        return "1" if row["arm"] == baseline else ""
    return f"{row[name]:.2f} ({row[f'{name}_low']:.2f}–{row[f'{name}_high']:.2f})"


def spread_cell(row: Row, name: str, unit: str = "") -> str:
    return f"{row[name]:.2f}{unit} ({row[f'{name}_p10']:.2f}–{row[f'{name}_p90']:.2f})"


def _number(row: Row, name: str, form: str, unit: str = "") -> str:
    return format(row[name], form) + unit if name in row else ""


def add_results(report: Report) -> None:
    """``ARM_vs_BASELINE_bBATCH`` (with ``_pTOKENS`` for every prompt length but the first) and ``ARM_agreement_bBATCH``; how many
    arms are marked, and how many ran where the fewest did."""
    lengths = sorted({row["prompt_tokens"] for row in report.rows if "prompt_tokens" in row})
    for row in report.rows:
        if "rounds" in row:
            place = f"b{row['batch']}" + (f"_p{row['prompt_tokens']}" if row["prompt_tokens"] != lengths[0] else "")
            arm = re.sub(r"\W", "_", row["arm"])
            for baseline in report.settings["baselines"]:
                if f"vs_{baseline}" in row:
                    report.add(re.sub(r"\W", "_", f"{arm}_vs_{baseline}_{place}"), row[f"vs_{baseline}"])
            if "agreement" in row:
                report.add(f"{arm}_agreement_{place}", row["agreement"])
    if report.rows:
        report.add("arms_marked", len({row["arm"] for row in report.rows if row.get("mark")}))
        ran = [sum("rounds" in row for row in rows) for rows in places(report.rows).values()]
        report.add("bench_device_arms", min(ran))
