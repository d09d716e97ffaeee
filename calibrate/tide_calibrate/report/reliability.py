"""Reliability diagram: share of tokens that agree with the full model, over the probability that a router predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from tide_calibrate.report.canvas import COLOURS, MARKERS, MUTED, house_style, legend_below, panels
from tide_calibrate.traces.trace import ExitTrace, SplitTrace

BINS = 10
PROBABILITIES = ("mlp", "max_probability")  # entropy scores are in 0 … 1 as well, but are not probabilities


@dataclass(frozen=True)
class Reliability:
    """Reliability of one router at one exit, with tokens sorted by score into bins of equal size.

    Args:
        router: the router's name.
        checkpoint, head: the exit.
        score: mean score of each bin, ascending.
        agreement: share of each bin's tokens that agree with the full model.
        calibration_error: mean |score - agreement| over tokens, 0 … 1 (expected calibration error, Guo et al. 2017).
    """

    router: str
    checkpoint: int
    head: str
    score: list[float]
    agreement: list[float]
    calibration_error: float


def reliability(trace: SplitTrace, exits: Sequence[tuple[int, str]]) -> list[Reliability]:
    """Reliability of every router whose score is a probability, at each of ``exits`` = (checkpoint, head)."""
    traces = [trace.exits[key] for key in exits]
    return [_bin(router, traced) for router in PROBABILITIES for traced in traces if len(traced.scores.get(router, ()))]


def _bin(router: str, trace: ExitTrace) -> Reliability:
    scores = trace.scores[router]
    bins = np.array_split(np.argsort(scores, kind="stable"), min(BINS, scores.size))
    means = [float(scores[b].mean(dtype=np.float64)) for b in bins]
    agrees = [float(trace.agrees[b].mean()) for b in bins]
    error = sum(abs(m - a) * len(b) for m, a, b in zip(means, agrees, bins, strict=True)) / scores.size
    rounded = [[round(value, 6) for value in values] for values in (means, agrees)]
    return Reliability(router, trace.checkpoint, trace.head, rounded[0], rounded[1], round(error, 6))


@house_style
def draw_reliability(lines: list[Reliability]) -> Figure:
    """Draw one panel per router and one line per exit; the diagonal is perfect calibration."""
    routers = list(dict.fromkeys(line.router for line in lines))
    exits = list(dict.fromkeys((line.checkpoint, line.head) for line in lines))
    figure, axes = panels(routers, height=3.5)
    for axis, router in zip(axes, routers, strict=True):
        axis.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle="--", label="perfectly calibrated")
        for line in (line for line in lines if line.router == router):
            i = exits.index((line.checkpoint, line.head))
            style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4}
            axis.plot(line.score, line.agreement, label=f"layer {line.checkpoint}, {line.head}", **style)
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1)
        axis.set_box_aspect(1)
        axis.xaxis.set_major_formatter(PercentFormatter(1))
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.set_xlabel("router's score")
    axes[0].set_ylabel("tokens that agree with the full model")
    legend_below(figure, axes[0])
    return figure


def describe_reliability(lines: Sequence[Reliability]) -> str:
    """Describe the chart in words (alternative text)."""
    errors = [
        f"{line.router} after layer {line.checkpoint} with head {line.head} is off by {line.calibration_error:.1%} on average"
        for line in lines
    ]
    return "Reliability diagram, agreement over router score: " + "; ".join(errors) + "."
