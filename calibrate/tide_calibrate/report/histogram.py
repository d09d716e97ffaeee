"""Exit histogram: the layers at which tokens stop under the chosen thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from tide_runtime.bundle.calibration import ExitInfo

from tide_calibrate.report.canvas import COLOURS, MUTED, house_style, panels
from tide_calibrate.report.stops import Policy, stops, thresholds_of
from tide_calibrate.traces.trace import SplitTrace


@dataclass(frozen=True)
class ExitHistogram:
    """Distribution of one policy's tokens over exits.

    Args:
        policy: ``exact`` (a stop is a draft) or ``exit`` (a stop is final).
        source: source of the tokens: ``held-out text`` or ``own continuations``.
        checkpoints: layers run before each exit; the model's L layers come last.
        shares: share of tokens that stop at each checkpoint; the sum is 1.
    """

    policy: str
    source: str
    checkpoints: list[int]
    shares: list[float]


def exit_histogram(trace: SplitTrace, exits: Sequence[ExitInfo], policy: Policy, source: str) -> ExitHistogram:
    """Count the stops of ``policy`` on the tokens of ``trace``."""
    indices = stops(trace, exits, thresholds_of(exits, policy)).exit_index
    shares = np.bincount(indices, minlength=len(exits) + 1) / max(indices.size, 1)
    checkpoints = [info.checkpoint for info in exits] + [trace.num_layers]
    return ExitHistogram(policy, source, checkpoints, [round(float(share), 6) for share in shares])


@house_style
def draw_histogram(histograms: list[ExitHistogram]) -> Figure:
    """Draw one panel per histogram; the last bar, in grey, counts the tokens that run every layer."""
    figure, axes = panels([f"policy {h.policy}, {h.source}" for h in histograms], height=3.2)
    for axis, histogram in zip(axes, histograms, strict=True):
        places = range(len(histogram.shares))
        colours = [COLOURS[0]] * (len(histogram.shares) - 1) + [MUTED]
        bars = axis.bar(places, histogram.shares, color=colours, width=0.62)
        axis.bar_label(bars, [f"{share:.0%}" for share in histogram.shares], padding=2, fontsize=9)
        labels = [str(layers) for layers in histogram.checkpoints]
        axis.set_xticks(list(places), [*labels[:-1], f"{labels[-1]} (all)"])
        axis.set_ylim(0, 1.08)
        axis.set_xlim(-0.6, max(len(histogram.shares), 3) - 0.4)
        axis.grid(axis="x", visible=False)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.set_xlabel("layers run before stopping")
    axes[0].set_ylabel("tokens")
    return figure


def describe_histogram(histograms: Sequence[ExitHistogram]) -> str:
    """Describe the chart in words (alternative text)."""
    return "Bar chart of where tokens stop. " + " ".join(
        f"Policy {h.policy}, {h.source}: "
        + ", ".join(f"{share:.0%} after layer {layer}" for layer, share in zip(h.checkpoints, h.shares, strict=True))
        + "."
        for h in histograms
    )
