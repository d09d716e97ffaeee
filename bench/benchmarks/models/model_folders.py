"""The models that benchmarks run, and where their weights and bundles are kept: the demo models, and Llamas of random weights.

No torch at import: processes whose memory is measured import this.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tide_export.load import LoadedModel

_ROOT = Path(__file__).resolve().parents[3]
CACHE = _ROOT / "build" / "bench-cache"  # weights and bundles between runs
DEMO_MODELS = _ROOT / "examples" / "demo_model"
_VOCABULARY = 32000


def random_llama(
    layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, dtype: str = "float32"
) -> LoadedModel:
    """Seeded random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tide_export.load import LoadedModel

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
    return LoadedModel(
        AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval(), None, f"llama{layers}x{hidden}"
    )


def write_llama_1b_bf16(folder: Path) -> None:
    """22 layers, hidden size 2048, and a tokenizer of made-up words."""
    model = random_llama(22, 2048, heads=32, kv_heads=4, mlp=5632, vocab=_VOCABULARY, dtype="bfloat16").model
    model.save_pretrained(folder)
    _write_word_tokenizer(folder)


def _write_word_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i} ": i for i in range(_VOCABULARY)}  # onnxruntime-genai's builder requires a tokenizer
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0 "))).save_pretrained(folder)
