"""Draw a report: every chart as a PNG file, and the page that embeds them; agreement by depth is drawn here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tide_calibrate.report.canvas import COLOURS, MARKERS, house_style, legend_below, panels, png
from tide_calibrate.report.curve import describe_curve, draw_curve
from tide_calibrate.report.data import ReportData, read_data
from tide_calibrate.report.histogram import describe_histogram, draw_histogram
from tide_calibrate.report.page import PAGE_NAME, Chart, render_page
from tide_calibrate.report.reliability import describe_reliability, draw_reliability
from tide_calibrate.traces.trace import HeadAgreement
from tide_export.calibration.calibration_file import CalibrationFile, read_calibration

REPORT_NAME = "report"
_TITLES = {"text": "on the held-out text", "continuations": "on the model's own greedy continuations"}


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


@house_style
def draw_agreement(lines: Sequence[HeadAgreement], num_layers: int) -> Figure:
    """Draw agreement on the held-out text on the left and, if measured, on the model's own continuations on the right."""
    sides = ["text"] + (["continuations"] if any(line.continuations for line in lines) else [])
    figure, axes = panels([_TITLES[side] for side in sides])
    for axis, side in zip(axes, sides, strict=True):
        for i, line in enumerate(lines):
            style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
            axis.plot(line.checkpoints, getattr(line, side), label=line.head, **style)
        axis.set_xlim(0, num_layers)
        axis.set_ylim(0, 1)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.set_xlabel(f"layers run before the exit (of {num_layers})")
    axes[0].set_ylabel("tokens that agree with the full model")
    legend_below(figure, axes[0])
    return figure


def describe_agreement(lines: Sequence[HeadAgreement]) -> str:
    """Describe the chart in words (alternative text)."""
    ends = [
        f"{line.head} goes from {line.text[0]:.0%} after layer {line.checkpoints[0]} "
        f"to {line.text[-1]:.0%} after layer {line.checkpoints[-1]}"
        for line in lines
    ]
    return "Line chart of agreement with the full model on held-out text, by exit layer: " + "; ".join(ends) + "."
