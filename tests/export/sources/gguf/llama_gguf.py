"""Llamas of HuggingFace written to GGUF files, as llama.cpp's converter writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

_SLOTS = 2048
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
