"""The named figures of a comparison, drawn from its rows."""

from __future__ import annotations

import re

from tide_bench.figures import BASELINES
from tide_bench.report import Report


def add_results(report: Report) -> None:
    """``ARM_vs_BASELINE_bBATCH`` (with ``_pTOKENS`` for every prompt length but the first) and ``ARM_agreement_bBATCH``."""
    lengths = sorted({row["prompt_tokens"] for row in report.rows if "prompt_tokens" in row})
    for row in report.rows:
        if "batch" in row and "rounds" in row:
            place = f"b{row['batch']}" + (f"_p{row['prompt_tokens']}" if row["prompt_tokens"] != lengths[0] else "")
            arm = re.sub(r"\W", "_", row["arm"])
            for baseline in BASELINES:
                if f"vs_{baseline}" in row:
                    report.add(f"{arm}_vs_{baseline}_{place}", row[f"vs_{baseline}"])
            if "agreement" in row:
                report.add(f"{arm}_agreement_{place}", row["agreement"])
    if report.rows and all("batch" in row for row in report.rows):
        report.add("arms_marked", len({row["arm"] for row in report.rows if row.get("mark")}))
