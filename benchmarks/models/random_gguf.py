"""GGUF files of random weights in the shapes of real models, written one tensor at a time: 7 billion parameters take no memory.

Exports of them take the time and memory of the real file. Without a tokenizer's texts, prompts are token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.models.random_blocks import BLOCKS


@dataclass(frozen=True)
class Qwen2Shape:
    """The shape of a Qwen2.5. ``kind``: GGUF's type of matrices whose input features are whole blocks of it."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    kind: str


SHAPES = {
    "05b": Qwen2Shape(24, 896, 4864, 14, 2, 151936, True, "Q4_K"),
    "18b": Qwen2Shape(28, 1536, 8960, 12, 2, 151936, False, "Q4_0"),
    "7b": Qwen2Shape(28, 3584, 18944, 28, 4, 152064, False, "Q4_0"),
}
_SLOTS = 4096


def write_random_gguf(shape: Qwen2Shape, file: Path, vocabulary: Callable[[Any, int], None] | None = None) -> None:
    """A file as llama.cpp's converter and quantiser write it: matrices that have no whole super-blocks are Q5_0, the tied
    embedding is Q8_0, norms and biases are F32.

    ``vocabulary``: adds so many tokens to the GGUFWriter; None: the file has no tokenizer.
    """
    from gguf import GGUFWriter

    writer, rng = GGUFWriter(file, "qwen2"), np.random.default_rng(0)
    writer.add_context_length(_SLOTS)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    if vocabulary is not None:
        vocabulary(writer, shape.vocab)
    else:
        writer.add_tokenizer_model("none")
    data: list[Callable[[], NDArray]] = []
    for name, sizes in _tensors(shape):
        kind = _kind(shape, name, sizes)
        make = _maker(kind, sizes, rng)
        _declare(writer, name, sizes, kind)
        data.append(make)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for make in data:
        writer.write_tensor_data(make())
    writer.close()


def _tensors(shape: Qwen2Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape, output features first."""
    hidden, mlp = shape.hidden, shape.mlp
    keys = hidden // shape.heads * shape.kv_heads
    yield "token_embd", (shape.vocab, hidden)
    for layer in range(shape.layers):
        yield f"blk.{layer}.attn_norm", (hidden,)
        yield f"blk.{layer}.ffn_norm", (hidden,)
        for part, width in (("q", hidden), ("k", keys), ("v", keys)):
            yield f"blk.{layer}.attn_{part}", (width, hidden)
            yield f"blk.{layer}.attn_{part}.bias", (width,)
        yield f"blk.{layer}.attn_output", (hidden, hidden)
        yield f"blk.{layer}.ffn_gate", (mlp, hidden)
        yield f"blk.{layer}.ffn_up", (mlp, hidden)
        yield f"blk.{layer}.ffn_down", (hidden, mlp)
    yield "output_norm", (hidden,)
    if not shape.tied:
        yield "output", (shape.vocab, hidden)


def _kind(shape: Qwen2Shape, name: str, sizes: tuple[int, ...]) -> str:
    if len(sizes) == 1:
        return "F32"
    if name == "token_embd" and shape.tied:
        return "Q8_0"
    return shape.kind if sizes[1] % 256 == 0 or not shape.kind.endswith("_K") else "Q5_0"


def _maker(kind: str, sizes: tuple[int, ...], rng: np.random.Generator) -> Callable[[], NDArray]:
    if kind == "F32":
        return lambda: rng.normal(1, 0.1, sizes).astype(np.float32)
    rows, columns = sizes
    return lambda: BLOCKS[kind](rows, columns, rng)


def _declare(writer: object, name: str, sizes: tuple[int, ...], kind: str) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    assert isinstance(writer, GGUFWriter)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    full = name if name.endswith(".bias") else f"{name}.weight"
    count = int(np.prod(sizes)) // block * size
    writer.add_tensor_info(full, sizes, np.dtype(np.float32), count, GGMLQuantizationType[kind])
