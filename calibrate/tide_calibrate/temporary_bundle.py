"""A bundle of the model under calibration, in a temporary folder: capture runs its segments, and step costs and policies are
timed on it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tide_calibrate.measured_target import CPU
from tide_export.calibration.exit_calibration import ExitCalibration
from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

MAX_SEQ_LEN = 1024  # KV cache slots, if no window is longer; `measure_costs` times steps with the first 96 of them filled


class TemporaryBundle:
    """Exported when `path` is first called; deleted when the context ends.

    Args:
        cuts: layers run before each cut, 1 … L - 1.
        directory: where the temporary folder is made.
        window: tokens that a sequence must have room for.
        calibration: what it is exported with, which adds its own cuts; None: nothing.
        target: its only target.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        dtype: str,
        cuts: Sequence[int],
        directory: Path,
        window: int = 0,
        calibration: ExitCalibration | None = None,
        target: str = CPU,
    ) -> None:
        self._loaded = loaded
        self._directory = directory
        self._calibration = calibration
        self.target = target
        self._config = ExportConfig(
            dtype=dtype,
            checkpoints=",".join(str(cut) for cut in sorted(set(cuts))) or ExportConfig.checkpoints,
            max_seq_len=min(max(MAX_SEQ_LEN, window), loaded.positions or MAX_SEQ_LEN),
            targets=(target,),
            verify=False,
        )
        self._folder = ExitStack()
        self._bundle: Path | None = None

    def path(self) -> Path:
        """The bundle's folder. Raises a child of TideError when the model cannot be exported."""
        if self._bundle is None:
            temporary = self._folder.enter_context(tempfile.TemporaryDirectory(prefix="bundle.", dir=self._directory))
            bundle = Path(temporary, "bundle")
            bundle.mkdir()
            write_bundle(self._loaded, bundle, self._config, ExportProgress(quiet=True), self._calibration)
            self._bundle = bundle
        return self._bundle

    def __enter__(self) -> TemporaryBundle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._folder.close()
