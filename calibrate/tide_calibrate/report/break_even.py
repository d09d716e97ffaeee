"""Why exits pay or not: what a draft of each exit takes, and how often it would have to be right."""

from __future__ import annotations

from tide_runtime.costs.cost_model import StepTable

from tide_calibrate.exit_heads import parse_kind
from tide_export.calibration.calibration_file import CalibrationFile, HeadAgreement

COLUMNS = ["layers", "head", "agreement", "price of a draft", "break-even agreement"]


def break_even_rows(file: CalibrationFile) -> list[list[str]]:
    """`COLUMNS` of the head that lacks least at each candidate, one sequence; empty where costs were not measured.

    A draft at layer c takes c layers, its head and the loop around them, and its verification an additional token in the layers
    behind it, in passes through all layers; it gives a token where it agrees. The layers before c are not run again, so that a
    refused draft costs what it took. A router that never errs would let only right ones through, so exits can pay a little below.
    """
    if file.calibration.costs is None:
        return []
    table, rows = StepTable.of(file.calibration.costs), []
    for layer in sorted({layer for line in file.heads for layer in line.checkpoints}):
        choices = [(line, *_price(file, table, layer, line.head)) for line in file.heads if layer in line.checkpoints]
        line, price, needed = min(choices, key=lambda choice: choice[2] - _agreement(choice[0], layer))
        agreement = f"{_agreement(line, layer):.0%}"
        rows.append([str(layer), line.head, agreement, f"{price:.0%}", f"{needed:.0%}" if needed < 1 else "never"])
    return rows


def _agreement(line: HeadAgreement, layer: int) -> float:
    return (line.continuations or line.text)[line.checkpoints.index(layer)]


def _price(file: CalibrationFile, table: StepTable, layer: int, head: str) -> tuple[float, float]:
    """A draft's time, and with its verification, in passes."""
    one, two, tail = table.step(1, 1), table.step(1, 2), parse_kind(head)[1]
    whole = one.launch_ms + file.num_layers * one.layer_ms + one.logits_ms + one.host_ms
    translator = 0.0 if head == "identity" else one.exit_ms
    end = one.launch_ms + tail * one.layer_ms + one.logits_ms if tail else one.head_ms
    draft = one.launch_ms + layer * one.layer_ms + translator + end + one.host_ms + one.ask_extra_ms
    further = (file.num_layers - layer) * (two.layer_ms - one.layer_ms) + two.logits_ms - one.logits_ms
    return draft / whole, (draft + max(0.0, further)) / whole
