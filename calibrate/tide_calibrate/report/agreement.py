"""Agreement by depth: how often an exit head's likeliest token is the full model's, at each candidate layer."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tide_calibrate.report.canvas import COLOURS, MARKERS, legend_below, panels
from tide_calibrate.traces import SplitTrace


@dataclass(frozen=True)
class HeadAgreement:
    """One kind of exit head over the candidates.

    Args:
        head: ``identity``, ``linear``, ``tail:k`` or ``block:k``.
        checkpoints: layers run before the exit, rising.
        text: share of tokens of the test text that agree, one per checkpoint.
        continuations: the same on the model's own greedy continuations; empty when there were none.
    """

    head: str
    checkpoints: list[int]
    text: list[float]
    continuations: list[float]


def agreement_by_depth(text: SplitTrace, continuations: SplitTrace | None) -> list[HeadAgreement]:
    """Agreement of every head in ``text``, in the order in which the heads appear."""
    lines = []
    for head in dict.fromkeys(head for _, head in text.exits):
        checkpoints = sorted(layer for layer, name in text.exits if name == head)
        on_text = [_share(text, layer, head) for layer in checkpoints]
        on_own = [_share(continuations, layer, head) for layer in checkpoints] if continuations is not None else []
        lines.append(HeadAgreement(head, checkpoints, on_text, on_own))
    return lines


def _share(trace: SplitTrace, checkpoint: int, head: str) -> float:
    return round(float(trace.exits[checkpoint, head].agrees.mean()), 6)


def draw_agreement(lines: list[HeadAgreement], num_layers: int) -> Figure:
    """One line per head; text on the left, the model's own continuations on the right when there are some."""
    sides = ["text"] + (["continuations"] if any(line.continuations for line in lines) else [])
    titles = {"text": "on the held-out text", "continuations": "on the model's own greedy continuations"}
    figure, axes = panels([titles[side] for side in sides])
    for axis, side in zip(axes, sides, strict=True):
        for i, line in enumerate(lines):
            style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
            axis.plot(line.checkpoints, getattr(line, side), label=line.head, **style)
        axis.set_xlim(0, num_layers)
        axis.set_ylim(0, 1)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.set_xlabel(f"layers run before the exit (of {num_layers})")
    axes[0].set_ylabel("tokens that agree with the full model")
    legend_below(figure, axes[0])
    return figure
