"""Where tokens stop under given thresholds, and the histogram of it under the chosen ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import ExitInfo

from tide_calibrate.placement.decisions import decide
from tide_calibrate.report.canvas import COLOURS, MUTED, house_style, panels
from tide_calibrate.traces.trace import SplitTrace

Policy = Literal["exact", "exit"]


@dataclass(frozen=True)
class Stops:
    """Stops of n tokens.

    Args:
        exit_index: [n] int, index of the exit where the token stops; the number of exits when it runs all layers.
        layers: [n] int, layers run until the token is final: the prefix, or all of the model's, and those inside every evaluated
            exit head, including heads after which the token did not stop.
    """

    exit_index: NDArray[np.int64]
    layers: NDArray[np.int64]


def thresholds_of(exits: Sequence[ExitInfo], policy: Policy) -> list[float]:
    """The exits' thresholds for ``policy``; infinite where none was certified."""
    if policy == "exact":
        return [info.exact_threshold for info in exits]
    return [float("inf") if info.exit_threshold is None else info.exit_threshold for info in exits]


def stops(trace: SplitTrace, exits: Sequence[ExitInfo], thresholds: Sequence[float] | NDArray[np.float64]) -> Stops:
    """Find the first exit, shallow first, whose router is confident, for every token of ``trace``."""
    count = trace.window.size
    exit_index = np.full(count, len(exits))
    layers = np.zeros(count, np.int64)
    for i, (info, threshold) in enumerate(zip(exits, thresholds, strict=True)):
        if not np.isfinite(threshold):
            continue  # the exit is never evaluated
        decisions = decide(trace, info, threshold)
        running = exit_index == len(exits)
        layers[running & decisions.runs_head] += info.tail_layers
        layers[running & decisions.confident] += info.checkpoint
        exit_index[running & decisions.confident] = i
    layers[exit_index == len(exits)] += trace.num_layers
    return Stops(exit_index, layers)


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
