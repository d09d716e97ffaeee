"""Figures of each kind of work, from the rows of its tasks; for the console and for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

KIND_COLUMNS = ("kind", "tasks", "tokens", "full, tokens/s", "speedup", "worst", "tokens/pass", "accepted", "layers", "score")
CALIBRATED = "calibrated fp32"
# Names of results: of the mean over all tasks, and before all others, by weights.
GEOMEANS = {"fp32": "default_geomean", "int4": "int4_default_geomean", CALIBRATED: "calibrated_geomean"}
PREFIXES = {"fp32": "", "int4": "int4_", CALIBRATED: "calibrated_"}
CAPTION = "Speedup of decoding over `full`, median and worst task. Layers: launched per token. Score: 0 to 1."


def kind_rows(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """`KIND_COLUMNS` of every kind among the tasks of one model, by name."""
    return [_cells(kind, [row for row in rows if row["kind"] == kind]) for kind in sorted({row["kind"] for row in rows})]


def _cells(kind: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    drafted = sum(row["drafted"] for row in rows)
    return [
        kind,
        str(len(rows)),
        f"{fmean(row['tokens'] for row in rows):.0f}",
        f"{median(row['full_tokens_per_s'] for row in rows):.0f}",
        f"{median(row['speedup'] for row in rows):.2f}",
        f"{min(row['speedup'] for row in rows):.2f}",
        f"{fmean(row['tokens_per_pass'] for row in rows):.2f}",
        f"{sum(row['accepted'] for row in rows) / drafted:.0%}" if drafted else "",
        f"{fmean(row['layers_per_token'] for row in rows):.1f}",
        f"{fmean(row['score'] for row in rows):.2f}",
    ]
