"""The report of a comparison as one HTML page with everything inside it, its charts too, which are also files next to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from tide_calibrate.report.canvas import COLOURS, INK, MUTED, house_style, legend_below, panels, png
from tide_calibrate.report.page import PAGE_NAME, Chart

from tide_bench.curve import CERTIFIED, FULL, CurvePoint
from tide_bench.report import Report, phase_lines
from tide_bench.results import Row, places

COSTS = {
    "layer_passes": ("layer passes per 1,000 tokens", "Cost counted in layers: the same on every machine."),
    "ms": ("ms per 1,000 tokens", "Cost in time on this machine."),
    "joules": ("joules per 1,000 tokens", "Cost in energy by the machine's own counters, which count everything on it."),
}
_BAR_INCHES = 0.3


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


def speed_charts(rows: Sequence[Row]) -> list[Chart]:
    """A chart for every place where arms were timed: speed over the unsplit graph, or over eager where that did not run."""
    charts = []
    for number, (place, own) in enumerate(places(rows).items()):
        baseline = next((b for b in ("unsplit", "eager") if any(f"vs_{b}" in row for row in own)), None)
        shown = [row for row in own if f"vs_{baseline}" in row]
        if baseline is None or not shown:
            continue
        name = f"vs_{baseline}"
        values_in_words = " ".join(f"{row['title']}: {row[name]:.2f}." for row in shown)
        caption = (
            "Median of neighbouring turns with its 95% interval. Grey arms differ from the model's text, or promise nothing."
        )
        picture = png(draw_speed(shown, baseline))
        charts.append(Chart(f"speed_{number}", f"Speed, {place}", caption, f"Speed over {baseline}. {values_in_words}", picture))
    return charts


@house_style
def draw_speed(rows: Sequence[Row], baseline: str) -> Figure:
    """A bar for each row, fastest on top; those without a rank are grey."""
    figure, [axis] = panels([f"speed over {baseline} (1: as fast)"], height=1.2 + _BAR_INCHES * len(rows))
    name = f"vs_{baseline}"
    rows = sorted(rows, key=lambda row: row[name])
    values = [row[name] for row in rows]
    errors = [
        [max(0.0, row[name] - row[f"{name}_low"]) for row in rows],
        [max(0.0, row[f"{name}_high"] - row[name]) for row in rows],
    ]
    colours = [MUTED if row.get("mark") else COLOURS[0] for row in rows]
    axis.barh([row["title"] for row in rows], values, color=colours, xerr=errors, error_kw={"ecolor": INK, "elinewidth": 1})
    axis.axvline(1, color=INK, linewidth=1)
    axis.grid(False, axis="y")
    return figure


def curve_charts(points: Sequence[CurvePoint]) -> list[Chart]:
    """A chart for every cost that was counted; none without points."""
    charts = []
    for cost, (title, caption) in COSTS.items():
        if points and all(getattr(point, cost) is not None for point in points):
            picture = png(draw_curve(points, cost))
            charts.append(
                Chart(f"curve_{cost}", f"Cost and performance: {title}", caption, describe_curve(points, cost), picture)
            )
    return charts


@house_style
def draw_curve(points: Sequence[CurvePoint], cost: str) -> Figure:
    """Agreement on the left, perplexity on the right, over ``cost``; the certified point is a star."""
    figure, axes = panels(["agreement with full", "perplexity of the text"], height=3.9, share_y=False)
    for axis, measure in zip(axes, ("agreement", "perplexity"), strict=True):
        _plot(axis, points, cost, measure)
        axis.set_xlabel(COSTS[cost][0])
        axis.set_xlim(left=0)
    axes[0].yaxis.set_major_formatter(PercentFormatter(1))
    legend_below(figure, axes[0])
    return figure


def _plot(axis: Axes, points: Sequence[CurvePoint], cost: str, measure: str) -> None:
    sweep = [point for point in points if point.name not in (FULL, CERTIFIED)]
    axis.plot(*_xy(sweep, cost, measure), color=COLOURS[0], marker=".", label="exit, swept over its threshold")
    axis.plot(*_xy([p for p in points if p.name == FULL], cost, measure), "o", color=INK, markersize=7, label="full")
    certified = [point for point in points if point.name == CERTIFIED]
    axis.plot(*_xy(certified, cost, measure), "*", color=COLOURS[1], markersize=15, markeredgecolor="white", label="certified")


def _xy(points: Sequence[CurvePoint], cost: str, measure: str) -> tuple[list[float], list[float]]:
    return [getattr(point, cost) for point in points], [getattr(point, measure) for point in points]


def describe_curve(points: Sequence[CurvePoint], cost: str) -> str:
    """The chart in words, for screen readers."""
    return f"{COSTS[cost][0]} against agreement and perplexity. " + " ".join(
        f"{p.name}: {getattr(p, cost):.0f}, agreement {p.agreement:.1%}, perplexity {p.perplexity:.4g}." for p in points
    )
