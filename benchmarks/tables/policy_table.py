"""What the depth-policy benchmark shows: its tables, and the named results drawn from their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from tide_bench.report import Report

from benchmarks.arms.policy_list import POLICIES, TITLES

BASELINE = "unsplit"
HEADINGS = (
    "arm", "× unsplit (95%)", "× total", "tokens/s", "layers/token", "launches/token",
    "theory ×", "measured ÷ theory", "disagreement", "drafts kept", "n-gram hits",
)  # fmt: skip
CAPTION = (
    "× unsplit: median over groups of prompts of the paired ratio, and of all time; layers: launched for a row, per token; "
    "launches: of segments, per token of the batch; theory: the calibration's costs of the launches made; "
    "disagreement with full: per token up to the first difference (share of all tokens that differ); "
    "n-gram hits: share of the text that its own n-grams foretell"
)


def title_of(arm: str) -> str:
    return "unsplit ONNX graph" if arm == BASELINE else TITLES[arm]


def cells(row: Mapping[str, Any]) -> list[str]:
    """One row of the table under `HEADINGS`; what an arm does not have is left empty."""
    ratio = f"{row['ratio_median']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})"
    return [
        title_of(row["arm"]),
        "1" if row["arm"] == BASELINE else ratio,
        "1" if row["arm"] == BASELINE else f"{row['ratio_total']:.2f}",
        f"{row['tokens_per_s']:.0f}",
        _number(row, "layers_per_token", ".1f"),
        _number(row, "launches_per_token", ".2f"),
        _number(row, "theoretical", ".2f"),
        _number(row, "measured_over_theoretical", ".2f"),
        f"{row['disagreement']:.2%} ({row['differing_tokens']:.1%})" if "disagreement" in row else "",
        " ".join(f"{d} {row[f'accepted_{d}']:.0%}" for d in ("router", "ngram") if f"accepted_{d}" in row),
        f"{row['ngram_hits']:.0%}",
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
    """``ARM_MODEL_bBATCH`` (and ``_t08`` at temperature 0.8) for every ratio, and the summaries.

    ``measured_over_theoretical``: the median over greedy rows of `exact` and `exit`, its ``_least`` their minimum;
    ``worst_case``: the least ratio of any policy, on any model, at any batch size and temperature.
    """
    rows = [row for row in report.rows if "ratio_median" in row]
    for row in rows:
        if row["arm"] != BASELINE:
            report.add(f"{row['arm']}_{_place(row)}", row["ratio_median"])
        elif not row["temperature"]:
            report.add(f"ngram_hits_{_place(row)}", row["ngram_hits"])
    for row in rows:
        if "disagreement" in row and row["arm"] in POLICIES:
            report.add(f"disagreement_{row['arm']}_{_place(row)}", row["disagreement"])
    policies = [row for row in rows if row["arm"] in POLICIES]
    skipping = [row for row in policies if POLICIES[row["arm"]].policy != "full" and not row["temperature"]]
    shares = [row["measured_over_theoretical"] for row in skipping if "measured_over_theoretical" in row]
    if shares:
        report.add("measured_over_theoretical", median(shares))
        report.add("measured_over_theoretical_least", min(shares))
    if policies:
        worst = min(policies, key=lambda row: row["ratio_median"])
        report.add("worst_case", worst["ratio_median"])
        report.add("worst_case_low", worst["ratio_low"])
        report.add("worst_case_high", worst["ratio_high"])


def _place(row: Mapping[str, Any]) -> str:
    sampled = f"_t{row['temperature']:g}".replace(".", "") if row["temperature"] else ""
    return f"{row['model']}_b{row['batch']}{sampled}"


def _number(row: Mapping[str, Any], name: str, form: str) -> str:
    return format(row[name], form) if name in row else ""
