"""Measure a model's step costs on this machine on a temporary bundle."""

from __future__ import annotations

from pathlib import Path

from tide_runtime.bundle.calibration import CostTable

from tide_calibrate.costs.measure import measuring_checkpoints
from tide_calibrate.costs.subprocess import measure_in_own_process
from tide_calibrate.temporary_bundle import TARGET, TemporaryBundle
from tide_export.load import LoadedModel
from tide_export.trace import decoder_layers


def measure_model_costs(loaded: LoadedModel, dtype: str, directory: Path, bundle: TemporaryBundle | None = None) -> CostTable:
    """Time the graphs of ``bundle``, or of a new export of ``loaded`` into ``directory``, which is deleted afterwards."""
    if bundle is not None:
        path = bundle.path()
        return measure_in_own_process(path, TARGET, path.with_name("costs.json"))
    with TemporaryBundle(loaded, dtype, measuring_checkpoints(len(decoder_layers(loaded.model))), directory) as own:
        return measure_model_costs(loaded, dtype, directory, own)
