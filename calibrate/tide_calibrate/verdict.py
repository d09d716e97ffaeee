"""A calibration's outcome in sentences, the same on the command line and in the report."""

from __future__ import annotations

from tide_runtime.calibration import CalibrationInfo

from tide_calibrate.calibration_file import CalibrationFile
from tide_calibrate.certificate import meaning


def recommendation_line(calibration: CalibrationInfo) -> str:
    """Which policy to use, and why."""
    name = calibration.recommended
    if name in calibration.predicted and name != "full":
        return f"Use policy {name}: {calibration.predicted[name]:.2f}x the uncut model's tokens/s is predicted, one row, greedy."
    if not calibration.exits:
        return "Use policy full: no exit head agrees with the model often enough, early enough, to gain from stopping there."
    best = max(calibration.predicted.values(), default=None)
    reason = "costs were not measured, so no gain is known" if best is None else f"at most {best:.2f}x is predicted"
    return f"Use policy {name}: {reason}."


def predicted_line(calibration: CalibrationInfo) -> str:
    """Modelled speedups of every policy."""
    if not calibration.predicted:
        return "not predicted, for no costs were measured"
    return ", ".join(f"{name} {speedup:.2f}x" for name, speedup in calibration.predicted.items())


def certificate_line(file: CalibrationFile) -> str:
    """What the certificate of policy ``exit`` promises, or why there is none."""
    certificate = file.calibration.certificate
    if certificate is None:
        return f"No certificate for policy exit: {file.refusal}."
    return f"Certificate: {meaning(certificate)}"
