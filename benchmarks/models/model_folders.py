"""The models that arms of other libraries run too: weights as HuggingFace folders, and prompts as token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tide_bench.build_cache import cached_folder, files_digest
from tide_bench.in_process import run_in_process
from tokenizers import Tokenizer

from examples.demo_data import held_out_files

CACHE = Path(__file__).resolve().parents[2] / "build" / "bench-cache"  # where weights and bundles are kept between runs
_DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo_model"
_DEMO_WEIGHTS = _DEMO / "layerskip"
_LLAMA_1B_VOCAB = 32000


@dataclass(frozen=True)
class BenchModel:
    """A model and how much of it a benchmark runs by default.

    Args:
        name: short name, used on the command line and in result names.
        title: what people see.
        prompt_tokens, new_tokens: tokens a sequence.
        weights: makes or finds the HuggingFace folder, given the cache folder.
        identity: changes when the weights do.
        prompts: ``prompts(rows, tokens)`` → token ids [sequences][tokens].
    """

    name: str
    title: str
    prompt_tokens: int
    new_tokens: int
    weights: Callable[[Path], Path]
    identity: Callable[[], str]
    prompts: Callable[[int, int], list[list[int]]]


def _demo_identity() -> str:
    return files_digest(sorted(p for p in _DEMO_WEIGHTS.iterdir() if p.suffix in (".json", ".safetensors")))


def _held_out_prompts(rows: int, tokens: int) -> list[list[int]]:
    """The first ``tokens`` tokens of ``rows`` Python files the demo model was not trained on, in path order."""
    tokenizer = Tokenizer.from_file(str(_DEMO_WEIGHTS / "tokenizer.json"))
    prompts: list[list[int]] = []
    for file in held_out_files():
        ids = tokenizer.encode(file.text).ids[:tokens]
        if len(ids) == tokens:
            prompts.append(ids)
        if len(prompts) == rows:
            return prompts
    raise ValueError(f"only {len(prompts)} held-out files have {tokens} tokens; use a batch of at most {len(prompts)}")


def _write_llama_1b(folder: Path) -> None:
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from benchmarks.models.demo import BENCH_MODELS

    BENCH_MODELS["1b"]().model.save_pretrained(folder)
    words = {f"w{i} ": i for i in range(_LLAMA_1B_VOCAB)}  # onnxruntime-genai's builder requires a tokenizer
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0 "))).save_pretrained(folder)


def _llama_1b_identity() -> str:
    """The recipe: weights of the same seed from the same code."""
    return files_digest([Path(__file__).with_name("demo.py")]) + f" torch {version('torch')}"


def _llama_1b(cache: Path) -> Path:
    return cached_folder(cache / "1b" / "weights", _llama_1b_identity(), lambda f: run_in_process(_write_llama_1b, f))


def _seeded_ids(rows: int, tokens: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, _LLAMA_1B_VOCAB, (rows, tokens)).tolist()


MODELS = {
    "demo": BenchModel(
        name="demo",
        title="demo model (24 layers, hidden 192, 10M parameters)",
        prompt_tokens=64,
        new_tokens=64,
        weights=lambda cache: _DEMO_WEIGHTS,
        identity=_demo_identity,
        prompts=_held_out_prompts,
    ),
    "1b": BenchModel(
        name="1b",
        title="random Llama (22 layers, hidden 2048, 1.1B parameters)",
        prompt_tokens=32,
        new_tokens=12,
        weights=_llama_1b,
        identity=_llama_1b_identity,
        prompts=_seeded_ids,
    ),
}
