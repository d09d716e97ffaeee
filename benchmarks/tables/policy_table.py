"""What the depth-policy benchmark shows: its tables, and the named results drawn from their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from tide_bench.report import Report

from benchmarks.arms.policy_arms import BASELINE

HEADINGS = ("arm", "× full (95%)", "× total", "tokens/s", "layers/token", "disagreement", "drafts kept")
CAPTION = (
    "× full: median over groups of prompts of the ratio of neighbouring turns, and of all time; layers: launched for a row, per "
    "token; disagreement with full: per token up to the first difference (share of all tokens that differ)"
)


def cells(row: Mapping[str, Any]) -> list[str]:
    """One row of the table under `HEADINGS`; what an arm does not have is left empty."""
    ratio = f"{row['ratio_median']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})"
    return [
        row["title"],
        "1" if row["arm"] == BASELINE else ratio,
        "1" if row["arm"] == BASELINE else f"{row['ratio_total']:.2f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['layers_per_token']:.1f}",
        f"{row['disagreement']:.2%} ({row['differing_tokens']:.1%})" if "disagreement" in row else "",
        " ".join(f"{d} {row[f'accepted_{d}']:.0%}" for d in ("router", "ngram", "head") if f"accepted_{d}" in row),
    ]


def print_policy_table(console: Console, place: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], load: float) -> None:
    decoding = f"temperature {place['temperature']:g}" if place["temperature"] else "greedy"
    table = Table(title=f"{place['model']}, batch {place['batch']}, {decoding}, {rows[0]['groups']} groups")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("arm", "drafts kept") else "right")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    console.print(f"Other processes took {load:.0%} of the CPU meanwhile")


def add_policy_results(report: Report) -> None:
    """``ARM_MODEL_bBATCH`` (and ``_t08`` at temperature 0.8) for every ratio, and ``worst_case``, the least of them all."""
    policies = [row for row in report.rows if row["arm"] != BASELINE]
    for row in policies:
        report.add(f"{row['arm']}_{_place(row)}", row["ratio_median"])
    for row in policies:
        if "disagreement" in row:
            report.add(f"disagreement_{row['arm']}_{_place(row)}", row["disagreement"])
    if policies:
        worst = min(policies, key=lambda row: row["ratio_median"])
        report.add("worst_case", worst["ratio_median"])
        report.add("worst_case_low", worst["ratio_low"])
        report.add("worst_case_high", worst["ratio_high"])


def _place(row: Mapping[str, Any]) -> str:
    sampled = f"_t{row['temperature']:g}".replace(".", "") if row["temperature"] else ""
    return f"{row['model']}_b{row['batch']}{sampled}"
