"""Agreement by depth: how often each exit head's likeliest token is the full model's."""

from __future__ import annotations

from collections.abc import Sequence

from tide_calibrate.traces.trace import SplitTrace
from tide_export.calibration.calibration_file import HeadAgreement


def agreement_by_depth(text: SplitTrace, continuations: SplitTrace | None) -> list[HeadAgreement]:
    """Agreement of every head at every checkpoint, in the order in which the heads appear in ``text``."""
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
    """Table rows, one per checkpoint: layers run, then each head's agreement, or a dash where the head was not trained.

    Agreement on the model's own continuations follows in brackets, where it was measured.
    """
    checkpoints = sorted({layer for line in lines for layer in line.checkpoints})
    return [[str(layer), *(_cell(line, layer) for line in lines)] for layer in checkpoints]


def _cell(line: HeadAgreement, layer: int) -> str:
    if layer not in line.checkpoints:
        return "–"
    i = line.checkpoints.index(layer)
    own = f" ({line.continuations[i]:.0%})" if line.continuations else ""
    return f"{line.text[i]:.1%}{own}"
