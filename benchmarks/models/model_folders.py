"""Where benchmarks keep weights and bundles, and a 1.1B Llama of random weights as a HuggingFace folder for all libraries."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
from tide_bench.build_cache import cached_folder, files_digest
from tide_bench.in_process import run_in_process

CACHE = Path(__file__).resolve().parents[2] / "build" / "bench-cache"  # weights and bundles between runs
LLAMA_1B = "random Llama (22 layers, hidden 2048, 1.1B parameters)"
_VOCABULARY = 32000


def llama_1b(cache: Path) -> Path:
    """The folder, made in ``cache``."""
    return cached_folder(cache / "1b" / "weights", llama_1b_identity(), lambda f: run_in_process(_write_llama_1b, f))


def llama_1b_identity() -> str:
    """The recipe: weights of the same seed from the same code."""
    return files_digest([Path(__file__).with_name("demo.py")]) + f" torch {version('torch')}"


def seeded_ids(rows: int, tokens: int) -> list[list[int]]:
    """Random prompts [rows][tokens] of its vocabulary."""
    return np.random.default_rng(0).integers(0, _VOCABULARY, (rows, tokens)).tolist()


def _write_llama_1b(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from benchmarks.models.demo import BENCH_MODELS

    BENCH_MODELS["1b"]().model.save_pretrained(folder)
    words = {f"w{i} ": i for i in range(_VOCABULARY)}  # onnxruntime-genai's builder requires a tokenizer
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0 "))).save_pretrained(folder)
