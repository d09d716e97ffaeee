"""Chart of agreement by depth, one line per exit head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tide_calibrate.report.canvas import COLOURS, MARKERS, house_style, legend_below, panels
from tide_calibrate.traces.agreement import HeadAgreement

_TITLES = {"text": "on the held-out text", "continuations": "on the model's own greedy continuations"}


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
