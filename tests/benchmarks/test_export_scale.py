"""The models whose export is measured, and what the figures say."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.export_scale import CASES, anonymous_bytes, measured_bytes
from benchmarks.models.random_gguf import SHAPES, write_random_gguf
from tide_export.load import load_model


@pytest.mark.parametrize("name", SHAPES)
def test_random_files_load_as_what_they_are(name: str, tmp_path: Path) -> None:
    """The seconds would be those of another kind of file, or of one that no loader takes."""
    shape = replace(SHAPES[name], layers=1, hidden=256 if name == "7b" else 64, mlp=512, heads=4, kv_heads=2, vocab=320)
    file = tmp_path / "random.gguf"
    write_random_gguf(shape, file)
    loaded = load_model(str(file), "fp32", stream=True)
    origins = {name: weight.origin for name, weight in loaded.quantized.items()}
    assert origins["model.layers.0.mlp.down_proj.weight"] == shape.kind
    assert (origins["lm_head.weight"] == "Q8_0") == shape.tied and len(origins) == 9
    for one in loaded.parameters.names():
        values = loaded.parameters.value(one).numpy()
        assert np.isfinite(values).all() and 0.005 < values.std() < 0.2


def test_memory_of_a_process() -> None:
    """A column of zeros, or of what other processes use."""
    before = anonymous_bytes(os.getpid())
    held = np.ones(1 << 24)
    assert 0.9 * held.nbytes < anonymous_bytes(os.getpid()) - before < 1.5 * held.nbytes
    assert anonymous_bytes(1 << 22) == 0  # no such process


def test_bytes_of_a_bundle(tmp_path: Path) -> None:
    """A ratio of a folder's own size would be that of its listing."""
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "weights.bin").write_bytes(bytes(100))
    (tmp_path / "manifest.json").write_bytes(bytes(10))
    assert measured_bytes(tmp_path) == 110 and measured_bytes(tmp_path / "manifest.json") == 10
    assert {"smollm2", "1b_bf16"} < set(CASES) <= {"smollm2", "1b_bf16", *SHAPES}
