"""The benchmark of recurrent models: its files load, and its figures are what they are called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from benchmarks.hybrids.families import FAMILIES, VOCAB, prompts
from benchmarks.hybrids.speed import share_of
from benchmarks.hybrids.toy_model import CONFIG, lessons
from benchmarks.models.hybrid_gguf import HYBRID_SHAPES
from benchmarks.models.random_gguf import write_random_gguf
from tide_export.quantization.gguf_source import load_gguf


@pytest.mark.parametrize("name", HYBRID_SHAPES)
def test_random_files_load_with_every_matrix_in_4_bits(name: str, tmp_path: Path) -> None:
    """The comparison with llama.cpp would be one of other weights, or of matrices that only TIDE dequantises."""
    shape = replace(HYBRID_SHAPES[name], layers=4, hidden=64, mlp=96, heads=2, kv_heads=1, head_dim=32, vocab=320, attention=(3,))
    sizes: dict[str, Any] = {
        "qwen35_08b": {"linear_heads": 2, "width": 32},
        "granite4h_350m": {"scan_heads": 4, "state": 16},
    }.get(name, {})
    file = tmp_path / "random.gguf"
    write_random_gguf(replace(shape, **sizes), file)
    model, parameters, _ = load_gguf(file, torch.float32)
    matrices = {n for n, p in model.named_parameters(remove_duplicate=False) if p.ndim == 2}
    assert parameters.low_bits.keys() == matrices and {w.origin for w in parameters.low_bits.values()} == {"Q4_0"}
    assert parameters.notes == [] and model.config.tie_word_embeddings
    for one in parameters.names():
        assert np.isfinite(parameters.value(one).numpy()).all()


def test_sizes_of_the_real_models() -> None:
    """A speed would be quoted for a model of another size."""
    counts = {name: sum(int(np.prod(tensor.sizes)) for tensor in shape.tensors()) / 1e6 for name, shape in HYBRID_SHAPES.items()}
    assert {name: round(count) for name, count in counts.items()} == {"qwen35_08b": 752, "lfm2_1b": 1170, "granite4h_350m": 340}


def test_share_of_the_recurrence() -> None:
    """Loading the model, or waiting between steps, would count as time of a step."""

    def event(kind: str, time: int, name: str = "node_kernel_time", category: str = "Node") -> dict[str, object]:
        return {"cat": category, "name": name, "dur": time, "args": {"op_name": kind}}

    events = [event("LinearAttention", 20), event("MatMulNBits", 70), event("Conv", 10)]
    noise = [event("", 500, "model_loading", "Session"), event("MatMulNBits", 900, "node_fence_before")]
    assert share_of([events, noise]) == pytest.approx(0.3) and share_of([]) == 0


def test_lessons_of_the_toy() -> None:
    """The toy would learn no reply, or one that its caches do not hold."""
    lengths = [len(request) + len(reply) for request, reply in lessons()]
    assert len(lengths) == 10 and max(lengths) < CONFIG["max_position_embeddings"]


def test_families_and_prompts() -> None:
    """A family that transformers does not know, or a prompt beyond the longest text, would end the run after minutes."""
    assert len(FAMILIES) >= 12
    for model_type, settings in FAMILIES.values():
        assert AutoConfig.for_model(model_type, **settings).vocab_size == VOCAB
    lengths = [len(prompt) for prompt in prompts(16)]
    assert len(set(lengths)) > 8 and max(lengths) + 24 < 128
