"""Bundles of one trace."""

from __future__ import annotations

from pathlib import Path

from tide_bench.bundles import write_cuts
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

from tide_export.load import load_model

PROMPTS = [[5, 9, 3, 7], [1, 8]]


def test_every_cut_is_the_whole_model(bundle: Path, hf_model_directory: Path, tmp_path: Path) -> None:
    """The second bundle of a trace would be cut from what the first one left, and the baseline be another model."""
    cuts = {tmp_path / "static_2": "2", tmp_path / "unsplit": "none"}
    write_cuts(load_model(str(hf_model_directory), "fp32"), cuts, "fp32", 64)
    texts, layers = [], []
    for folder in (bundle, *cuts):
        with Engine.load(folder, EngineOptions(threads=ThreadOptions(1))) as engine:
            texts.append([g.token_ids for g in engine.generate(PROMPTS, GenerationParams(max_new_tokens=6, ignore_eos=True))])
            layers.append(engine.manifest.checkpoints)
    assert texts[1:] == texts[:1] * 2 and layers[1:] == [[2], []]
