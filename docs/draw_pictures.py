"""The pictures of the documentation: python docs/draw_pictures.py writes docs/pictures/*.svg."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tide_calibrate.report.canvas import COLOURS, GRID, INK, MUTED, house_style, panels

FOLDER = Path(__file__).parent / "pictures"
LAYERS, CUT = 12, 4  # of the model in the pictures, and where it is cut
BLUE, ORANGE, GREEN = COLOURS[:3]


@house_style
def draw_segments() -> Figure:
    """Draws how one traced graph becomes segments with an exit between them."""
    figure, [axis] = panels([""], height=2.6)
    _frameless(axis, 12.4, 3)
    boxes = [
        (0.2, 2.6, f"segment 0\nembedding, layers 1–{CUT}", BLUE),
        (3.8, 1.9, "exit\nrouter, translator,\nLM head", ORANGE),
        (6.7, 3.2, f"segment 1\nlayers {CUT + 1}–{LAYERS}, norm, LM head", BLUE),
    ]
    for left, width, text, colour in boxes:
        axis.add_patch(Rectangle((left, 1), width, 1, facecolor=colour, alpha=0.18, edgecolor=colour))
        axis.text(left + width / 2, 1.5, text, ha="center", va="center", fontsize=8.5)
    for start, end in ((2.8, 3.8), (5.7, 6.7), (9.9, 10.9)):
        axis.annotate("", (end, 1.5), (start, 1.5), arrowprops={"arrowstyle": "->", "color": INK})
    axis.annotate("", (4.75, 2.72), (4.75, 2.0), arrowprops={"arrowstyle": "->", "color": ORANGE})
    axis.text(4.85, 2.3, "sure", fontsize=8)
    axis.text(6.2, 1.62, "not sure", ha="center", fontsize=8)
    axis.text(10.95, 1.5, "token", va="center")
    axis.text(4.75, 2.8, "draft (exact) or token (exit)", ha="center", fontsize=8.5)
    axis.text(
        0.2,
        0.55,
        "weights.bin: every tensor once, shared by all graphs; KV caches are updated in place",
        fontsize=8.5,
        color=MUTED,
    )
    return figure


@house_style
def draw_depths() -> Figure:
    """Which layers are run for which token, and when: a column is a token, a number the launch that ran the layers."""
    figure, axes = panels(["full", "exact", "exit"], height=3.2)
    deep = {  # per token: (launch of segment 0, launch of segment 1, None: not needed yet)
        "full": [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10)],
        "exact": [(1, 5), (2, 5), (3, 5), (4, 5), (6, 7)],
        "exit": [(1, 5), (2, 5), (3, 5), (4, 5), (6, None)],
    }
    for axis, launches in zip(axes, deep.values(), strict=True):
        _depths(axis, launches)
    axes[0].set_ylabel("layers")
    return figure


def _depths(axis: Axes, launches: Sequence[tuple[int, int | None]]) -> None:
    for token, (shallow, rest) in enumerate(launches):
        for low, high, launch, colour in ((0, CUT, shallow, BLUE), (CUT, LAYERS, rest, GREEN)):
            face = colour if launch is not None else "white"
            axis.add_patch(Rectangle((token + 0.06, low), 0.88, high - low, facecolor=face, alpha=0.25, edgecolor=MUTED))
            axis.text(token + 0.5, (low + high) / 2, str(launch) if launch is not None else "–", ha="center", va="center")
    axis.axhline(CUT, color=ORANGE, linewidth=1.5)
    axis.set(xlim=(0, len(launches)), ylim=(0, LAYERS), xticks=[], xlabel=f"tokens; {_launches(launches)} launches")
    axis.grid(False)


def _launches(launches: Sequence[tuple[int, int | None]]) -> int:
    return len({number for pair in launches for number in pair if number is not None})


@house_style
def draw_certificate() -> Figure:
    """What the certificate bounds: the rate of a new document, not of every document."""
    figure, [axis] = panels([""], height=2.8)
    rates = [0.2, 0.3, 0.4, 0.4, 0.5, 0.6, 0.6, 0.7, 0.8, 0.9, 1.0, 1.3, 1.9, 2.4]
    axis.bar(range(len(rates)), rates, color=[BLUE if rate <= 1 else ORANGE for rate in rates], alpha=0.7)
    axis.axhline(1.0, color=INK, linewidth=1, linestyle="--")
    axis.axhline(sum(rates) / len(rates), color=GREEN)
    axis.text(0, 1.04, "ε: promised", fontsize=8.5)
    axis.text(0, sum(rates) / len(rates) + 0.04, "mean over documents: what the promise is about", fontsize=8.5, color=GREEN)
    axis.set(xlabel="documents (an example, not measured)", ylabel="tokens that differ, %", xticks=[])
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {"segments": draw_segments, "depths": draw_depths, "certificate": draw_certificate}


def _frameless(axis: Axes, width: float, height: float) -> None:
    axis.set(xlim=(0, width), ylim=(0.3, height))
    axis.axis("off")


def main(folder: Path = FOLDER) -> None:
    """Write every picture as SVG; the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "tide", "svg.fonttype": "none", "grid.color": GRID}):
        for name, draw in PICTURES.items():
            draw().savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
