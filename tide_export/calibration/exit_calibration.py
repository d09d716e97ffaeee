"""Read a calibration directory and check that its exits and tensors are complete and belong to the model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.errors import CalibrationError

from tide_export.calibration.calibration_file import EXITS_NAME, CalibrationFile, read_calibration
from tide_export.calibration.exits_file import PARTS, ExitWeights, read_exits
from tide_export.load import fingerprint
from tide_export.model.probe import check_cuts
from tide_export.sources.loaded_model import LoadedModel

REPORT = Path("report/index.html")
_LARGEST_REPORT = 1 << 20  # bytes; a bundle is copied to every machine that serves it


@dataclass(frozen=True)
class ExitCalibration:
    """The calibration in ``directory``.

    Args:
        tensors: the exits' weights, by name in exits.safetensors.
        draft: the draft head's, by name; empty: there is none.
    """

    directory: Path
    file: CalibrationFile
    tensors: dict[str, NDArray[np.float32]]
    draft: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def info(self) -> CalibrationInfo:
        return self.file.calibration

    def check(self, loaded: LoadedModel) -> None:
        """Raise CalibrationError unless the exits were calibrated for this model and their tensors fit its hidden size."""
        self.file.check_model(fingerprint(loaded), loaded.source, loaded.weights)
        self.file.check_code(loaded.code, loaded.source)
        if self.info.exits:
            check_can_exit(loaded)
        hidden = int(loaded.model.config.get_text_config().hidden_size)
        if self.draft and self.draft["fuse"].shape[0] != hidden:
            raise _broken(self.directory, f"draft.fuse gives {self.draft['fuse'].shape[0]} channels, the model has {hidden}")
        head = self.info.draft_head
        if head is not None and (len(head.layers), head.layers[-1], head.width) != (2, self.file.num_layers, 2 * hidden):
            raise _broken(self.directory, f"the draft head reads {head.width} channels of the states after layers {head.layers}")
        for info in self.info.exits:
            if info.checkpoint >= self.file.num_layers - info.tail_layers:
                raise _broken(self.directory, f"the head {info.head} after {info.checkpoint} layers skips none")
            for name in _own_tensors(info):
                if name.endswith(".down") and self.tensors[name].shape[1] != hidden:
                    raise _broken(self.directory, f"{name} takes {self.tensors[name].shape[1]} channels, the model has {hidden}")

    def keep_report(self, bundle: Path) -> None:
        """Copy the report's page into the bundle, if there is one of at most 1 MiB."""
        page = self.directory / REPORT
        if page.is_file() and page.stat().st_size <= _LARGEST_REPORT:
            kept = bundle / "calibration" / REPORT
            kept.parent.mkdir(parents=True)
            shutil.copyfile(page, kept)


def check_can_exit(loaded: LoadedModel) -> None:
    """Raise CalibrationError where tokens cannot stop before the last layer."""
    if loaded.embedding is not None:
        raise CalibrationError(
            f"{loaded.name} is an embedding model, whose vectors are made of final states; export it without a calibration"
        )
    if loaded.is_recurrent:
        raise CalibrationError(
            f"{loaded.name} has recurrent layers, and early exits do not pay there: a token that skips such a layer leaves its "
            "state behind, and to bring that up to date costs about as much as the layer; export it without a calibration"
        )
    check_cuts(loaded.model, loaded.layers)


def read_exit_calibration(directory: Path) -> ExitCalibration:
    """The calibration in ``directory``. Raises CalibrationError if a file or tensor is missing or broken."""
    file = read_calibration(directory)
    exits = file.calibration.exits
    of_packages = {("translator", info.checkpoint) for info in exits if info.head_package}
    of_packages |= {("router", info.checkpoint) for info in exits if info.router_package}
    weights = read_exits(directory / EXITS_NAME, of_packages) if file.calibration.has_weights else ExitWeights()
    parts = {"translator": weights.translators, "router": weights.routers}
    tensors = {f"{part}.{c}.{name}": array for part in parts for c, named in parts[part].items() for name, array in named.items()}
    missing = [name for info in exits for name in _own_tensors(info) if name not in tensors]
    if missing:
        raise _broken(directory, f"{EXITS_NAME} lacks the tensors {', '.join(missing)}")
    if file.calibration.draft_head is not None and not weights.draft:
        raise _broken(directory, f"{EXITS_NAME} lacks the draft head")
    return ExitCalibration(directory, file, tensors, weights.draft if file.calibration.draft_head is not None else {})


def _own_tensors(info: ExitInfo) -> list[str]:
    """Names of the tensors of TIDE's own head and router; a package's module names its own."""
    names = [f"translator.{info.checkpoint}.{name}" for name in PARTS["translator"] if info.head != "identity"]
    routers = [f"router.{info.checkpoint}.{name}" for name in PARTS["router"] if info.has_mlp]
    return [*([] if info.router_package else routers), *([] if info.head_package else names)]


def _broken(directory: Path, problem: str) -> CalibrationError:
    return CalibrationError(f"the calibration {directory} is broken: {problem}; calibrate the model again")
