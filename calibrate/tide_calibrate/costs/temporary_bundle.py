"""Measure a model's step costs on this machine by exporting it to a temporary bundle."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tide_runtime.bundle.calibration import CostTable

from tide_calibrate.costs.measure import measuring_checkpoints
from tide_calibrate.costs.subprocess import measure_in_own_process
from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.load import LoadedModel
from tide_export.progress import ExportProgress
from tide_export.trace import decoder_layers

MAX_SEQ_LEN = 1024  # KV cache slots; `measure_costs` times steps with the first 96 of them filled


def measure_model_costs(loaded: LoadedModel, dtype: str, directory: Path, target: str = "cpu") -> CostTable:
    """Export ``loaded`` into a temporary folder in ``directory``, time its graphs there, and delete it."""
    cuts = measuring_checkpoints(len(decoder_layers(loaded.model)))
    positions = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or MAX_SEQ_LEN
    config = ExportConfig(
        dtype=dtype,
        checkpoints=",".join(str(cut) for cut in cuts),
        max_seq_len=min(MAX_SEQ_LEN, positions),
        targets=(target,),
        verify=False,
    )
    with tempfile.TemporaryDirectory(prefix="costs.", dir=directory) as temporary:
        bundle = Path(temporary, "bundle")
        bundle.mkdir()
        write_bundle(loaded, bundle, config, ExportProgress(quiet=True))
        return measure_in_own_process(bundle, target, Path(temporary, "costs.json"))
