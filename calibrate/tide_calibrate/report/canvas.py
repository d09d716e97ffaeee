"""Shared style of all charts, and reproducible PNG output: the same figure always gives the same bytes."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e8ec"
# The colour-blind-safe palette of Okabe and Ito, without black and yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P")

_STYLE: Any = {
    "font.family": "DejaVu Sans",  # bundled with matplotlib, hence the same on every machine
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
_DOTS_PER_INCH = 144

house_style = matplotlib.rc_context(_STYLE)  # decorator of every drawing function


@house_style
def panels(titles: list[str], height: float = 3.6, share_y: bool = True) -> tuple[Figure, list[Axes]]:
    """Create a figure, 8.4 inches wide and ``height`` inches high, with one panel per title side by side."""
    figure = Figure(figsize=(8.4, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, len(titles), sharey=share_y, squeeze=False)[0])
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title)
    return figure, axes


def legend_below(figure: Figure, axis: Axes, columns: int = 5) -> None:
    """Draw one legend of the entries of ``axis`` below the whole figure."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False)


@house_style
def png(figure: Figure) -> bytes:
    """Render the figure as PNG without date or program version in its metadata."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return stream.getvalue()
