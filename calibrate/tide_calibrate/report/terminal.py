"""Summary of a calibration on the terminal: tables of agreement and exits, and sentences that the HTML report shares."""

from __future__ import annotations

import re

from rich.console import Console
from rich.table import Table
from tide_runtime.bundle.calibration import OWN_HEAD, CalibrationInfo, DraftHeadInfo, ExitInfo

from tide_calibrate.certificate.certificate import meaning
from tide_calibrate.placement.candidates import EXACT
from tide_calibrate.placement.expected_speed import cut_model
from tide_calibrate.traces.trace import agreement_rows
from tide_export.calibration.calibration_file import CalibrationFile, HeadAgreement

BREAK_EVEN_COLUMNS = ["layers", "head", "agreement", "price of a draft", "break-even agreement"]


def print_summary(file: CalibrationFile, console: Console) -> None:
    """Print the tables of agreement by depth and of the chosen exits, the prediction, the certificate and the recommendation."""
    brackets = " (in brackets: on the model's own continuations)" if any(line.continuations for line in file.heads) else ""
    title = f"Agreement with the full model after n of {file.num_layers} layers{brackets}"
    console.print(_table(title, ["layers", *(line.head for line in file.heads)], agreement_rows(file.heads)))
    rows = exit_rows(file)
    even = break_even_rows(file)
    if rows:
        console.print(_table("Chosen exits", list(rows[0]), [list(row.values()) for row in rows]))
    elif even:
        title = "Why no exit pays: of the best head after n layers, in passes of the whole model"
        console.print(_table(title, BREAK_EVEN_COLUMNS, even))
    if file.calibration.draft_head is not None:
        console.print(draft_head_line(file.calibration.draft_head))
    if file.draft_head_left_out:
        console.print(f"Draft head: {file.draft_head_left_out}.")
    console.print(f"Predicted speedup over the uncut model, one sequence, greedy: {predicted_line(file.calibration)}")
    console.print(certificate_line(file))
    console.print(recommendation_line(file))


def recommendation_line(file: CalibrationFile) -> str:
    """Recommend a policy, with the reason."""
    calibration = file.calibration
    predicted = file.calibration.predicted
    if not predicted:
        return "Use policy full: costs were not measured, so no gain is known."
    refusal = "" if calibration.exits else f" No exits are placed: {file.refusal}."
    if calibration.recommended == "full":
        best = max((gain for name, gain in predicted.items() if name.startswith("exact")), default=1.0)
        if "exit" in predicted:
            return (
                f"Exits pay for policy exit alone: {predicted['exit']:.2f}x the uncut model's tokens/s, with tokens that the "
                f"certificate allows to differ; exact gains at most {best:.2f}x."
            )
        return (
            f"No exits pay: at most {best:.2f}x the uncut model's tokens/s is predicted for exact.{refusal} "
            "By default the bundle drafts without exits, where that saves time."
        )
    gain = f"{predicted['exact']:.2f}x the uncut model's tokens/s is predicted, one sequence, greedy"
    return f"Use policy exact: {gain}, with output identical to full.{refusal}"


def draft_head_line(info: DraftHeadInfo) -> str:
    """How often the draft head's guesses are right."""
    right = ", ".join(f"{share:.0%}" for share in info.acceptance)
    return f"Draft head: of its 1st, 2nd, … guesses {right} are right, each after right ones; {info.vocabulary:,} tokens."


def predicted_line(calibration: CalibrationInfo) -> str:
    """List the speedups of every policy: measured ones with their range, and which are only predictions from step costs."""
    predicted = calibration.predicted
    ranges = calibration.predicted_range
    if not predicted:
        return "not predicted, because no costs were measured"
    names = {name: "exact with drafts from exits alone" if name == EXACT else name for name in predicted}
    line = ", ".join(f"{names[name]} {gain:.2f}x{_range(ranges.get(name))}" for name, gain in predicted.items())
    not_measured = [names[name] for name in predicted if name != "full" and name not in ranges]
    if not not_measured:
        return line
    return f"{line}; predictions from step costs, not measured: {', '.join(not_measured)}"


def _range(ends: list[float] | None) -> str:
    return f" ({ends[0]:.2f}–{ends[1]:.2f})" if ends else ""


def certificate_line(file: CalibrationFile) -> str:
    """State the guarantee of policy ``exit``, or why there is none."""
    certificate = file.calibration.certificate
    if certificate is not None:
        return f"Certificate: {meaning(certificate)}"
    return f"No certificate for policy exit: {file.refusal if file.calibration.exits else 'there are no exits'}."


def exit_rows(file: CalibrationFile) -> list[dict[str, str]]:
    """Table rows of the exits, shallow first, column → value; with an MLP threshold column only if an exit has one."""
    with_mlp = any(info.mlp_threshold is not None for info in file.calibration.exits)
    return [_exit_row(info, file, with_mlp) for info in file.calibration.exits]


def _exit_row(info: ExitInfo, file: CalibrationFile, with_mlp: bool) -> dict[str, str]:
    line = next(line for line in file.heads if line.head == info.head)
    row = {
        "after layer": str(info.checkpoint),
        "exit head": info.head,
        "agreement": f"{line.text[line.checkpoints.index(info.checkpoint)]:.1%}",
        "router": info.router,
        "exact threshold": f"{info.exact_threshold:.3f}",
        "exit threshold": "none certified" if info.exit_threshold is None else f"{info.exit_threshold:.3f}",
    }
    if with_mlp:
        row["MLP threshold"] = "–" if info.mlp_threshold is None else f"{info.mlp_threshold:.3f}"
    return row


def break_even_rows(file: CalibrationFile) -> list[list[str]]:
    """Why exits pay or not: rows of `BREAK_EVEN_COLUMNS`, for each candidate layer the head that comes closest to paying.

    A draft at layer c takes c layers, its head and the loop around them, and its verification an additional token in the layers
    after c, in passes through all layers; it gives a token where it agrees. The layers before c are not run again, so that a
    refused draft costs only its own time. A router lets fewer wrong drafts through than these agreements, so that exits whose
    agreement is a little below the break-even can still pay. Empty where costs were not measured.
    """
    if file.calibration.costs is None:
        return []
    rows = []
    for layer in sorted({layer for line in file.heads for layer in line.checkpoints}):
        choices = [(line, *_draft_price(file, layer, line.head)) for line in file.heads if layer in line.checkpoints]
        line, price, needed = min(choices, key=lambda choice: choice[2] - _agreement(choice[0], layer))
        agreement = f"{_agreement(line, layer):.0%}"
        rows.append([str(layer), line.head, agreement, f"{price:.0%}", f"{needed:.0%}" if needed < 1 else "never"])
    return rows


def _agreement(line: HeadAgreement, layer: int) -> float:
    return (line.continuations or line.text)[line.checkpoints.index(layer)]


def _draft_price(file: CalibrationFile, layer: int, head: str) -> tuple[float, float]:
    """A draft's time, and with its verification, in passes."""
    assert file.calibration.costs is not None
    package = "" if re.fullmatch(OWN_HEAD, head) else "any"  # which does not need to be installed here
    info = ExitInfo(layer, head, "max_probability", 0.0, head_package=package)
    model, (early_exit,) = cut_model([info], file.num_layers, file.calibration.costs)
    draft = model.evaluation(1, 0, early_exit)
    whole = model.full(1, 1, 1)
    one, two = (model.finish(early_exit.boundary, tokens=tokens) for tokens in (1, 2))
    return draft / whole, (draft + max(0.0, two - one)) / whole


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
