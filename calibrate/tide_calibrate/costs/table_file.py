"""Cost tables as JSON files: measured once per machine, reused for calibrations of bundles for that machine."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from tide_runtime.bundle.calibration import CostTable, StepCost
from tide_runtime.errors import CalibrationError


def save_costs(table: CostTable, path: Path) -> None:
    """Write ``table`` to ``path``."""
    path.write_text(json.dumps(dataclasses.asdict(table), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_costs(path: Path) -> CostTable:
    """Read a table that `save_costs` wrote. Raises CalibrationError with the path and the fault when it is not a cost table."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({error.strerror}); give a cost table written on the target") from error
    except ValueError as error:
        raise CalibrationError(f"{path} is not JSON ({error}); measure the costs again") from error
    try:
        steps = [StepCost(**step) for step in data.pop("steps")]
        table = CostTable(steps=steps, **data)
        bad = [name for step in steps for name, value in vars(step).items() if not _is_valid(name, value)]
        bad += [name for name in ("unsplit_ms", "padding", "draw_ms") if not _is_valid(name, getattr(table, name))]
        bad += ["padding"] if table.padding > 1 else []
        bad += [] if steps else ["steps"]
    except (TypeError, KeyError, AttributeError) as error:
        raise CalibrationError(f"{path} is not a cost table ({error}); measure the costs again") from error
    if bad:
        raise CalibrationError(
            f"{path} has values of {', '.join(sorted(set(bad)))} that cannot be (times are in ms); measure them again"
        )
    return table


def _is_valid(name: str, value: Any) -> bool:
    if name == "rows":
        return isinstance(value, int) and value >= 1
    if name == "seq":
        return isinstance(value, int | float) and math.isfinite(value) and value >= 1
    minimum = 0.0 if name not in ("layer_ms", "unsplit_ms") else 1e-9
    return isinstance(value, int | float) and math.isfinite(value) and value >= minimum
