"""Calibrate a model on the way to its export: for one bundle, the files of the calibration are not kept."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tide_runtime.errors import CalibrationError

from tide_export.exit_calibration import ExitCalibration, read_exit_calibration
from tide_export.progress import ExportProgress


@contextmanager
def calibrated(
    source: str, data: str, beside: Path, revision: str | None, trust_remote_code: bool, progress: ExportProgress
) -> Iterator[ExitCalibration]:
    """Calibrate the model in ``source`` on the text in ``data``, with default options, in a temporary folder in ``beside``.

    The folder vanishes with the context, also when it is interrupted. Raises CalibrationError when the calibrator is not
    installed, and whatever `tide_calibrate.calibrate.calibrate` raises.
    """
    try:
        from tide_calibrate.calibrate import calibrate
    except ModuleNotFoundError as error:
        raise CalibrationError(
            f"--data calibrates the model first, which needs {error.name}; install it with: pip install tide-llm[calibrate]"
        ) from error
    with tempfile.TemporaryDirectory(prefix=".calibration.", dir=beside) as folder:
        out = Path(folder) / "calibration"
        calibrate(source, data, out, revision=revision, trust_remote_code=trust_remote_code, progress=progress)
        yield read_exit_calibration(out)
