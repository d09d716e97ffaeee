"""The models that benchmarks run, and where their weights and bundles are kept: the demo models, and random weights in several
shapes. No torch at import: processes whose memory is measured import this.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tide_bench.build_cache import cached_folder, files_digest, run_in_process
from tide_bench.bundles import export_bundle

if TYPE_CHECKING:
    from tide_export.load import LoadedModel

_ROOT = Path(__file__).resolve().parents[2]
CACHE = _ROOT / "build" / "bench-cache"  # weights and bundles between runs
DEMO_MODELS = _ROOT / "examples" / "demo_model"
LLAMA_1B = "random Llama (22 layers, hidden 2048, 1.1B parameters)"
TINY_VOCABULARY, TINY_MAX_SEQ_LEN = 128, 128
TINY_KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, fp32
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


def _load_demo() -> LoadedModel:
    from tide_export.load import load_model

    return load_model(str(DEMO_MODELS / "layerskip"), "fp32")


def _random_llama_1b(dtype: str = "float32") -> LoadedModel:
    return random_llama(22, 2048, heads=32, kv_heads=4, mlp=5632, vocab=_VOCABULARY, dtype=dtype)


BENCH_MODELS: dict[str, Callable[[], LoadedModel]] = {
    "demo": _load_demo,
    "llama12x512": lambda: random_llama(12, 512, heads=8, kv_heads=4, mlp=1408, vocab=4096),
    "1b": _random_llama_1b,
}


def _identity(*more: Path) -> str:
    """The recipe: weights of the same seed from the same code."""
    return f"{files_digest([*more, Path(__file__)])} torch {version('torch')}"


def llama_1b(cache: Path) -> Path:
    """The folder, made in ``cache``."""
    return cached_folder(cache / "1b" / "weights", llama_1b_identity(), lambda f: run_in_process(_write_llama_1b, f))


def llama_1b_identity() -> str:
    return _identity()


def seeded_ids(rows: int, tokens: int) -> list[list[int]]:
    """Random prompts [rows][tokens] of its vocabulary."""
    return np.random.default_rng(0).integers(0, _VOCABULARY, (rows, tokens)).tolist()


def _write_llama_1b(folder: Path) -> None:
    BENCH_MODELS["1b"]().model.save_pretrained(folder)
    _write_word_tokenizer(folder)


def write_llama_1b_bf16(folder: Path) -> None:
    """The same shape in bf16."""
    _random_llama_1b("bfloat16").model.save_pretrained(folder)
    _write_word_tokenizer(folder)


def _write_word_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i} ": i for i in range(_VOCABULARY)}  # onnxruntime-genai's builder requires a tokenizer
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0 "))).save_pretrained(folder)


def tiny_bundle(cache: Path) -> Path:
    """A Llama of four layers, small enough for ten thousands of requests. It has no tokenizer, and exits nowhere."""
    identity = _identity()
    weights = cached_folder(cache / "tiny" / "weights", identity, lambda folder: run_in_process(_write_tiny, folder))
    return export_bundle(weights, identity, cache / "tiny" / "bundle", max_seq_len=TINY_MAX_SEQ_LEN, tokenizer="none")


def _write_tiny(folder: Path) -> None:
    write_tiny_llama(folder, 4, 2 * TINY_MAX_SEQ_LEN)


def write_tiny_llama(folder: Path, layers: int, positions: int) -> None:
    """Save a random Llama of ``layers`` layers and `TINY_VOCABULARY` tokens, for texts of up to ``positions`` tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.3,  # text does not fall into a loop at once
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
