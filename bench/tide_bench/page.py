"""The report of a comparison as one HTML page with everything inside it, and its charts as files beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
from tide_calibrate.report.page import PAGE_NAME, Chart

from tide_bench.charts import curve_charts, speed_charts
from tide_bench.curve import CurvePoint
from tide_bench.phases import phase_lines
from tide_bench.report import Report


def write_report(report: Report, points: Sequence[CurvePoint], directory: Path) -> Path:
    """Write ``index.html`` and a PNG for every chart into ``directory``, made when missing; returns the page."""
    charts = [*speed_charts(report.rows), *curve_charts(points)]
    directory.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        (directory / f"{chart.name}.png").write_bytes(chart.png)
    page = directory / PAGE_NAME
    page.write_text(_render(report, charts), encoding="utf-8")
    return page


def _render(report: Report, charts: Sequence[Chart]) -> str:
    loader = jinja2.PackageLoader("tide_bench", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("page.html.j2").render(
        model=report.settings.get("model", ""),
        machine=report.machine_line(),
        tables=report.tables,
        charts=charts,
        phases=phase_lines(report.settings.get("phases", {})),
    )
