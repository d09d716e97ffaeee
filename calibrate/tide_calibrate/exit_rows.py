"""The chosen exits as rows of a table, for the terminal and the report."""

from __future__ import annotations

from tide_runtime.calibration import ExitInfo

from tide_calibrate.calibration_file import CalibrationFile


def exit_rows(file: CalibrationFile) -> list[dict[str, str]]:
    """Column → value of every exit, shallow first; the MLP's threshold only where a router has one."""
    asks_mlp = any(info.mlp_threshold is not None for info in file.calibration.exits)
    return [_row(info, file, asks_mlp) for info in file.calibration.exits]


def _row(info: ExitInfo, file: CalibrationFile, asks_mlp: bool) -> dict[str, str]:
    line = next(line for line in file.heads if line.head == info.head)
    row = {
        "after layer": str(info.checkpoint),
        "exit head": info.head,
        "agreement": f"{line.text[line.checkpoints.index(info.checkpoint)]:.1%}",
        "router": info.router,
        "exact threshold": f"{info.exact_threshold:.3f}",
        "exit threshold": "none certified" if info.exit_threshold is None else f"{info.exit_threshold:.3f}",
    }
    if asks_mlp:
        row["MLP threshold"] = "–" if info.mlp_threshold is None else f"{info.mlp_threshold:.3f}"
    return row
