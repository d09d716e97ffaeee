"""Bundles of tiny random models with recurrent layers."""

from pathlib import Path

from benchmarks.models.families import SLOTS, family_model
from tide_runtime.bundle.manifest import Manifest

from tide_export.config import ExportConfig
from tide_export.export import quantize_loaded, write_bundle
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel


def write_recurrent_bundle(
    name: str, directory: Path, weights: str = "source", kv: str = "model", verify: bool = True
) -> Manifest:
    """Export the tiny model of the family into ``directory``, which exists; ``weights`` and ``kv`` as `ExportConfig`'s."""
    progress = ExportProgress(quiet=True)
    config = ExportConfig(weights=weights, max_seq_len=SLOTS, targets=("cpu",), kv=kv, verify=verify)
    loaded = quantize_loaded(LoadedModel(family_model(name), None, name), weights, config.quantizer, progress)
    return write_bundle(loaded, directory, config, progress)[0]
