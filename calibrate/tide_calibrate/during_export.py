"""Calibration as the first step of ``tide-export --data``; tide_export finds it by the entry point ``tide_export.calibrate``."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tide_calibrate.calibrate import calibrate
from tide_calibrate.config import CalibrationConfig
from tide_export.calibration.exit_calibration import ExitCalibration, read_exit_calibration
from tide_export.progress import ExportProgress


@contextmanager
def calibrated(
    source: str,
    data: str,
    bundle: Path,
    revision: str | None,
    trust_remote_code: bool,
    progress: ExportProgress,
    weights: str,
    quantizer: str,
    tokenizer: str | None,
) -> Iterator[ExitCalibration]:
    """Calibrate the model in ``source`` on the text in ``data``, in a temporary folder next to ``bundle``.

    Options that are no argument have their defaults.

    The folder is deleted when the context ends. If the body fails or is interrupted, the calibration, which took minutes, is
    kept as ``<bundle>.calibration`` and the progress reports its path. Raises what `calibrate` raises.
    """
    with tempfile.TemporaryDirectory(prefix=".calibration.", dir=bundle.parent) as folder:
        out = Path(folder) / "calibration"
        config = CalibrationConfig(weights=weights, quantizer=quantizer)
        calibrate(
            source,
            data,
            out,
            config=config,
            progress=progress,
            revision=revision,
            trust_remote_code=trust_remote_code,
            tokenizer=tokenizer,
        )
        try:
            yield read_exit_calibration(out)
        except BaseException:
            kept = out.rename(_free_name(bundle))
            progress.note(f"the calibration is kept: export again with --calibration {kept}")
            raise


def _free_name(bundle: Path) -> Path:
    """The path ``<bundle>.calibration``, with a number appended if it exists."""
    names = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := bundle.with_name(f"{bundle.name}.calibration{name}")).exists())
