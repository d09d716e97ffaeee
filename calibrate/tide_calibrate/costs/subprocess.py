"""Measure a bundle's costs in a process of its own, configured like the commands: one thread pool for all graphs, and no torch.

ONNX Runtime fixes the thread pool of a process before its first session, so the calibrating process cannot change its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.errors import CalibrationError

from tide_calibrate.costs.measure import measure_costs
from tide_calibrate.costs.table_file import load_costs, save_costs


def measure_in_own_process(bundle: Path, target: str, file: Path) -> CostTable:
    """Measure the costs of ``bundle``, written to ``file`` as well. Raises CalibrationError when that fails."""
    command = [sys.executable, "-m", "tide_calibrate.costs.subprocess", str(bundle), target, str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CalibrationError(f"the costs of steps could not be measured ({lines[-1]}); give --costs none or a table")
    return load_costs(file)


if __name__ == "__main__":
    save_costs(measure_costs(sys.argv[1], sys.argv[2], threads=ThreadOptions(shared=True)), Path(sys.argv[3]))
