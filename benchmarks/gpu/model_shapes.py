"""The models that decode on a GPU: the demo model, and random weights in the shapes of published ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

if TYPE_CHECKING:
    from tide_export.load import LoadedModel

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "layerskip"
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MAX_SEQ_LEN = 512


def dtype_of(weights: str) -> str:
    """What the graphs compute in."""
    return "fp16" if weights == "int4" else weights


@dataclass(frozen=True)
class ModelShape:
    """``layers`` 0: the demo model. ``dtypes``: what it is measured in; int4: weights in 4 bits, computed in fp16."""

    name: str
    dtypes: tuple[str, ...]
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    mlp: int = 0
    vocab: int = 0

    def config(self) -> LlamaConfig:
        if not self.layers:
            return AutoConfig.from_pretrained(DEMO)
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=MAX_SEQ_LEN,
        )

    def load(self, dtype: str) -> LoadedModel:
        """The model in host memory, with rounded weights for int4; random weights by a seed."""
        from tide_export.load import quantized  # not at import: the GPU kit reads shapes, and takes no exporter along

        return quantized(self._load(dtype_of(dtype)), dtype, "rtn")

    def _load(self, dtype: str) -> LoadedModel:
        from tide_export.load import LoadedModel, load_model

        if not self.layers:
            return load_model(str(DEMO), dtype)
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config(), dtype=TORCH_DTYPES[dtype])
        return LoadedModel(model.eval(), None, self.name)


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("demo", ("fp32", "fp16", "int4")),
        ModelShape("1b", ("fp16", "int4"), 16, 2048, 32, 8, 8192, 128256),
        ModelShape("8b", ("fp16", "int4"), 32, 4096, 32, 8, 14336, 128256),
    )
}
