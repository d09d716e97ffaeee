"""Tokenizers and tiny models of GGUF files that llama.cpp reads as well: ids of texts, and log-probabilities of the same ids.

Blocks: the exporter reads the low-bit file, llama.cpp the same values written as F32, as its kernels round activations to 8 bits
where the weights are low-bit. So a difference says whether the blocks are read right, and not what rounding costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export.sources.gguf.llama_gguf import write_llama
from export.sources.gguf.llamacpp import LlamaCpp
from export.sources.gguf.tokenizer_files import write_byte_pairs, write_sentencepiece
from numpy.typing import NDArray

from tide_export.sources.gguf.segmentation import PRE_TOKENIZERS
from tide_export.sources.gguf.tokenizer import read_gguf_tokenizer

VOCAB, POSITIONS, THETA = 300, 128, 10000.0
BLOCKS = ("F32", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
K_BLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


@dataclass(frozen=True)
class TokenizerKind:
    """One tokenizer and how to write a file of it."""

    name: str
    write: Callable[[Path], Path]


def tokenizer_kinds() -> list[TokenizerKind]:
    """One for each way to cut a text; `PRE_TOKENIZERS` has several names for most."""
    first = {kind: name for name, kind in reversed(PRE_TOKENIZERS.items())}
    kinds = [TokenizerKind(name, _byte_pairs(name)) for name in first.values()]
    return [
        *kinds,
        TokenizerKind("sentencepiece", write_sentencepiece),
        TokenizerKind("sentencepiece, no prefix", lambda file: write_sentencepiece(file, prefix=False)),
    ]


def _byte_pairs(name: str) -> Callable[[Path], Path]:
    return lambda file: write_byte_pairs(file, name, bytes_as_letters=PRE_TOKENIZERS[name].byte_level)


def differing_ids(file: Path, samples: Sequence[str]) -> list[tuple[str, list[int], list[int]]]:
    """Texts whose ids, with or without BOS, are not llama.cpp's; with llama.cpp's ids and ours."""
    tokenizer = read_gguf_tokenizer(file)
    assert tokenizer is not None
    found = []
    reference = LlamaCpp(file, 256)
    for text in samples:
        for special in (True, False):
            wanted = reference.ids(text, special)
            got = tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids
            if wanted != got:
                found.append((text, wanted, got))
    return found


@dataclass(frozen=True)
class LogprobCase:
    """A tiny model. ``exported``: the file for TIDE, ``reference``: the same model for llama.cpp."""

    name: str
    exported: Path
    reference: Path


def block_case(kind: str, folder: Path) -> LogprobCase:
    """All matrices in blocks of ``kind``; the reference has their values in F32."""
    import gguf

    stored, kinds = gguf.GGMLQuantizationType[kind], gguf.GGMLQuantizationType
    rng = np.random.default_rng(1)
    packed: dict[str, NDArray] = {}

    def low_bit(name: str, matrix: NDArray[np.float32]) -> tuple[NDArray, Any]:
        packed[name] = _random_k_blocks(kind, matrix.shape, rng) if kind in K_BLOCK_BYTES else gguf.quantize(matrix, stored)
        return packed[name], stored

    weights, exported, reference = _tiny_weights(folder), folder / f"{kind}.gguf", folder / f"{kind}.f32.gguf"
    write_llama(weights, exported, low_bit)
    write_llama(weights, reference, lambda name, _: (gguf.dequantize(packed[name], stored), kinds.F32))
    return LogprobCase(kind, exported, reference)


def _random_k_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """gguf cannot quantise to these. Their scales are small, so that the values are those of trained weights."""
    data = rng.integers(0, 256, (shape[0], shape[1] // 256, K_BLOCK_BYTES[kind]), dtype=np.uint8)
    if kind == "Q6_K":
        data[..., 192:208] = rng.integers(1, 32, data[..., 192:208].shape)
        data[..., 208:] = np.array([1e-4], np.float16).view(np.uint8)
    else:
        data[..., :4] = np.array([2e-5, 2e-4], np.float16).view(np.uint8)
    return data.reshape(shape[0], -1)


ROPE: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "none": ({}, {}),
    "linear": ({"type": "linear", "factor": 4.0}, {}),
    "yarn": ({"type": "yarn", "factor": 4.0, "original_context_length": 32}, {}),
    "llama3": ({}, {"rope_freqs.weight": 1.0}),
    "longrope": (
        {"type": "longrope", "factor": 4.0, "original_context_length": 32},
        {"rope_factors_long.weight": 2.0, "rope_factors_short.weight": 1.0},
    ),
}
"""Keys ``rope.scaling.*`` and tensors, whose factors rise from 1 to 8 times the value, of each kind."""


def rope_case(kind: str, folder: Path) -> LogprobCase:
    """The fp32 model with positions scaled as ``kind`` says."""
    import gguf

    keys, tensors = ROPE[kind]

    def extra(writer: Any) -> None:
        for key, value in keys.items():
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(f"llama.rope.scaling.{key}", value)
        for name, factor in tensors.items():
            writer.add_tensor(name, (factor * np.geomspace(1, 8, 32)).astype(np.float32))

    file = folder / f"rope-{kind}.gguf"
    write_llama(_tiny_weights(folder), file, lambda _, matrix: (matrix, gguf.GGMLQuantizationType.F32), extra)
    return LogprobCase(f"RoPE {kind}", file, file)


def _tiny_weights(folder: Path) -> Path:
    """A HuggingFace folder of two layers, whose weights are large enough for positions to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    path = folder / "weights"
    if not path.exists():
        logging.disable_progress_bar()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            initializer_range=0.1,
        )
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def random_ids(count: int) -> list[int]:
    return np.random.default_rng(2).integers(0, VOCAB, count).tolist()
