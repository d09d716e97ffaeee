"""A calibration's outcome in sentences, the same on the command line and in the report."""

from __future__ import annotations

from tide_calibrate.calibration_file import CalibrationFile
from tide_calibrate.certificate import meaning


def recommendation_line(file: CalibrationFile) -> str:
    """Which policy to use, and why."""
    calibration, predicted = file.calibration, file.calibration.predicted
    if not predicted:
        return "Use policy full: costs were not measured, so no gain is known."
    why_none = "" if calibration.exits else f" No exits are placed: {file.refusal}."
    if calibration.recommended == "full":
        best = max((gain for name, gain in predicted.items() if name.startswith("exact")), default=1.0)
        return f"Use policy full: at most {best:.2f}x the uncut model's tokens/s is predicted for exact.{why_none}"
    gain = f"{predicted['exact']:.2f}x the uncut model's tokens/s is predicted, one row, greedy"
    return f"Use policy exact: {gain}, with output identical to full.{why_none}"


def predicted_line(predicted: dict[str, float]) -> str:
    """Modelled speedups of every policy."""
    if not predicted:
        return "not predicted, for no costs were measured"
    parts = {name: f"{name} {gain:.2f}x" for name, gain in predicted.items() if ":" not in name}
    alone = [f"{name.removeprefix('exact:')} {gain:.2f}x" for name, gain in predicted.items() if ":" in name]
    if alone:
        parts["exact"] += f" (with one drafter: {', '.join(alone)})"
    return ", ".join(parts.values())


def certificate_line(file: CalibrationFile) -> str:
    """What the certificate of policy ``exit`` promises, or why there is none."""
    certificate = file.calibration.certificate
    if certificate is not None:
        return f"Certificate: {meaning(certificate)}"
    return f"No certificate for policy exit: {file.refusal if file.calibration.exits else 'there are no exits'}."
