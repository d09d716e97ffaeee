"""GGUF files of random weights in the shapes of real models, written one tensor at a time: 7 billion parameters take no memory.

Exports of them take the time and memory of the real file. Without a vocabulary prompts are token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.models.random_blocks import BLOCKS

SLOTS = 4096


@dataclass(frozen=True)
class RandomTensor:
    """``sizes``: output features first. ``kind``: GGUF's type; numbers of F32 are normal around 1."""

    name: str
    sizes: tuple[int, ...]
    kind: str = "F32"


@dataclass(frozen=True)
class Qwen2Shape:
    """The shape of a Qwen2.5, as llama.cpp's converter and quantiser write it: matrices whose input features are no whole blocks
    of ``kind`` are Q5_0, the tied embedding is Q8_0, norms and biases are F32."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    kind: str
    architecture: str = "qwen2"

    def keys(self) -> Mapping[str, Any]:
        return {
            "context_length": SLOTS,
            "embedding_length": self.hidden,
            "block_count": self.layers,
            "feed_forward_length": self.mlp,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "rope.freq_base": 1e6,
            "attention.layer_norm_rms_epsilon": 1e-6,
        }

    def tensors(self) -> Iterator[RandomTensor]:
        hidden, mlp = self.hidden, self.mlp
        keys = hidden // self.heads * self.kv_heads
        yield RandomTensor("token_embd.weight", (self.vocab, hidden), "Q8_0" if self.tied else self._of(hidden))
        for layer in range(self.layers):
            yield RandomTensor(f"blk.{layer}.attn_norm.weight", (hidden,))
            yield RandomTensor(f"blk.{layer}.ffn_norm.weight", (hidden,))
            for part, width in (("q", hidden), ("k", keys), ("v", keys)):
                yield RandomTensor(f"blk.{layer}.attn_{part}.weight", (width, hidden), self._of(hidden))
                yield RandomTensor(f"blk.{layer}.attn_{part}.bias", (width,))
            yield RandomTensor(f"blk.{layer}.attn_output.weight", (hidden, hidden), self._of(hidden))
            yield RandomTensor(f"blk.{layer}.ffn_gate.weight", (mlp, hidden), self._of(hidden))
            yield RandomTensor(f"blk.{layer}.ffn_up.weight", (mlp, hidden), self._of(hidden))
            yield RandomTensor(f"blk.{layer}.ffn_down.weight", (hidden, mlp), self._of(mlp))
        yield RandomTensor("output_norm.weight", (hidden,))
        if not self.tied:
            yield RandomTensor("output.weight", (self.vocab, hidden), self._of(hidden))

    def _of(self, columns: int) -> str:
        return self.kind if columns % 256 == 0 or not self.kind.endswith("_K") else "Q5_0"


SHAPES = {
    "05b": Qwen2Shape(24, 896, 4864, 14, 2, 151936, True, "Q4_K"),
    "7b": Qwen2Shape(28, 3584, 18944, 28, 4, 152064, False, "Q4_0"),
}


def write_random_gguf(shape: Qwen2Shape, file: Path, vocabulary: Callable[[Any, int], None] | None = None) -> None:
    """``vocabulary``: adds so many tokens to the GGUFWriter; None: the file has no tokenizer."""
    from gguf import GGUFWriter

    writer = GGUFWriter(file, shape.architecture)
    rng = np.random.default_rng(0)
    for key, value in shape.keys().items():
        add = {int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{shape.architecture}.{key}", value)
    if vocabulary is not None:
        vocabulary(writer, shape.vocab)
    else:
        writer.add_tokenizer_model("none")
    tensors = list(shape.tensors())
    for tensor in tensors:
        _declare(writer, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(_values(tensor, rng))
    writer.close()


def byte_vocabulary(writer: Any, size: int, many_control: bool = True) -> None:
    """Bytes and made-up tokens, with all the metadata that OpenVINO GenAI's reader wants. ``many_control``: the made-up ones are
    control tokens, which no text becomes."""
    from gguf import TokenType

    spelled = sorted(ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*spelled, "ab", *(f"<w{i}>" for i in range(len(spelled) + 1, size))])
    others = TokenType.CONTROL if many_control else TokenType.NORMAL
    plain = [*[TokenType.NORMAL] * (len(spelled) + 1), TokenType.CONTROL]
    writer.add_token_types([*plain, *[others] * (size - len(plain))])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
        add(len(spelled) + 1)
    writer.add_add_bos_token(False)
    writer.add_file_type(2)  # mostly Q4_0
    writer.add_chat_template("{{ messages[0]['content'] }}")


def _values(tensor: RandomTensor, rng: np.random.Generator) -> NDArray:
    if tensor.kind == "F32":
        return rng.normal(1.0, 0.1, tensor.sizes).astype(np.float32)
    rows, columns = tensor.sizes
    return BLOCKS[tensor.kind](rows, columns, rng)


def _declare(writer: Any, tensor: RandomTensor) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType[tensor.kind]
    block, size = GGML_QUANT_SIZES[kind]
    count = int(np.prod(tensor.sizes)) // block * size
    writer.add_tensor_info(tensor.name, tensor.sizes, np.dtype(np.float32), count, kind)
