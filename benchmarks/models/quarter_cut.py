"""A bundle with one cut after a quarter of the layers: where exits pay, if they do."""

from __future__ import annotations

from pathlib import Path

from tide_bench.bundles import export_bundle
from transformers import AutoConfig

from benchmarks.models.model_folders import BenchModel

SLOTS = 256


def quarter_cut(model: BenchModel, cache: Path) -> tuple[Path, int]:
    """The bundle of ``model``, and the layers in front of its cut; kept in ``cache``."""
    weights = model.weights(cache)
    place = round(AutoConfig.from_pretrained(weights).num_hidden_layers / 4)
    return export_bundle(weights, model.identity(), cache / model.name / "quarter_cut", str(place), max_seq_len=SLOTS), place
