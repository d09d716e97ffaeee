"""Draw a report: every chart as a PNG file, and the page that embeds them."""

from __future__ import annotations

from pathlib import Path

from tide_calibrate.report.agreement import describe_agreement, draw_agreement
from tide_calibrate.report.canvas import png
from tide_calibrate.report.curve import describe_curve, draw_curve
from tide_calibrate.report.data import ReportData, read_data
from tide_calibrate.report.histogram import describe_histogram, draw_histogram
from tide_calibrate.report.page import PAGE_NAME, Chart, render_page
from tide_calibrate.report.reliability import describe_reliability, draw_reliability
from tide_export.calibration.calibration_file import CalibrationFile, read_calibration

REPORT_NAME = "report"


def redraw(directory: Path) -> Path:
    """Draw the report of the calibration in ``directory`` again from its saved data; returns the page.

    Raises CalibrationError when the calibration or the report's data is missing or broken.
    """
    file = read_calibration(directory)
    report = directory / REPORT_NAME
    return draw_report(file, read_data(report), report)


def draw_report(file: CalibrationFile, data: ReportData, directory: Path) -> Path:
    """Write the charts and the page into ``directory``, which exists; returns the page."""
    charts = _charts(data)
    for chart in charts:
        (directory / f"{chart.name}.png").write_bytes(chart.png)
    page = directory / PAGE_NAME
    page.write_text(render_page(file, charts), encoding="utf-8")
    return page


def _charts(data: ReportData) -> list[Chart]:
    charts = [
        Chart(
            "curve",
            "Cost and performance",
            "What every layer not run costs in agreement and perplexity. Layers per token count the layers inside exit heads, "
            "also when the head was evaluated and the token did not stop. Static layer skip stops every token at the same layer, "
            "with the head that agrees most there.",
            describe_curve(data.curve),
            png(draw_curve(data.curve)),
        ),
        Chart(
            "agreement",
            "Agreement by depth",
            "How often an exit head's likeliest next token is the full model's, if every token stopped there.",
            describe_agreement(data.agreement),
            png(draw_agreement(data.agreement, data.num_layers)),
        ),
        Chart(
            "histogram",
            "Where tokens stop",
            "Under the chosen thresholds. With policy exit a stop is final; with exact it is a draft, verified later.",
            describe_histogram(data.histograms),
            png(draw_histogram(data.histograms)),
        ),
    ]
    if data.reliability:
        charts.append(_reliability_chart(data))
    return charts


def _reliability_chart(data: ReportData) -> Chart:
    return Chart(
        "reliability",
        "Calibration of the routers",
        "Tokens of the held-out text in ten bins of equal size by score. On the dashed diagonal the score is the probability "
        "of agreement; below it the router is overconfident.",
        describe_reliability(data.reliability),
        png(draw_reliability(data.reliability)),
    )
