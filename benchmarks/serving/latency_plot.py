"""The chart of part `poisson`: percentiles of latency over the load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tide_calibrate.report.canvas import COLOURS, MARKERS, house_style, legend_below, panels, png

from benchmarks.serving.latency import PERCENTILES

PANELS = {"ttft": "time to first token, ms", "itl": "time between tokens, ms"}


@house_style
def draw_latency(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG. ``rows``: of `report_poisson`; a colour for each arm, a marker for each percentile."""
    figure, axes = panels(list(PANELS.values()), share_y=False)
    for axis, kind in zip(axes, PANELS, strict=True):
        for colour, arm in zip(COLOURS, dict.fromkeys(row["arm"] for row in rows), strict=False):
            own = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["share"])
            for marker, q in zip(MARKERS, PERCENTILES, strict=False):
                values = [row[f"{kind}_ms_p{q}"] for row in own]
                label = f"{own[0]['title']}, p{q}"
                axis.plot([row["share"] for row in own], values, color=colour, marker=marker, alpha=0.4 + 0.006 * q, label=label)
        axis.set_yscale("log")
        axis.set_xlabel("load, % of TIDE's capacity")
    legend_below(figure, axes[0], columns=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(figure))
