"""The models that benchmarks run: the demo model, and random weights in the shapes of real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tide_export.load import LoadedModel, load_model

DEMO_MODELS = Path(__file__).resolve().parents[2] / "examples" / "demo_model"


def random_llama(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int) -> LoadedModel:
    """Seeded random fp32 weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
    )
    return LoadedModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), None, f"llama{layers}x{hidden}")


BENCH_MODELS: dict[str, Callable[[], LoadedModel]] = {
    "demo": lambda: load_model(str(DEMO_MODELS / "layerskip"), "fp32"),
    "llama12x512": lambda: random_llama(12, 512, heads=8, kv_heads=4, mlp=1408, vocab=4096),
    "1b": lambda: random_llama(22, 2048, heads=32, kv_heads=4, mlp=5632, vocab=32000),
}
