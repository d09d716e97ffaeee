"""How often each exit head's likeliest token is the full model's: the first thing to know about a model."""

from __future__ import annotations

from collections.abc import Sequence

from tide_calibrate.traces.trace import SplitTrace
from tide_export.calibration.calibration_file import HeadAgreement


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


def agreement_rows(lines: Sequence[HeadAgreement]) -> list[list[str]]:
    """A table: one row per checkpoint, the layers first, then each head's agreement; a dash where a head was not trained.

    On the model's own continuations in brackets, where it was measured.
    """
    checkpoints = sorted({layer for line in lines for layer in line.checkpoints})
    return [[str(layer), *(_cell(line, layer) for line in lines)] for layer in checkpoints]


def _cell(line: HeadAgreement, layer: int) -> str:
    if layer not in line.checkpoints:
        return "–"
    i = line.checkpoints.index(layer)
    own = f" ({line.continuations[i]:.0%})" if line.continuations else ""
    return f"{line.text[i]:.1%}{own}"
