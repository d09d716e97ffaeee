"""Tiny random models as GGUF files, written as llama.cpp's converter writes them: every key and tensor of the architecture."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFValueType
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 320
CONTEXT = 256
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=CONTEXT, initializer_range=0.25, tie_word_embeddings=False,
)  # fmt: skip
_GPT2 = dict(vocab_size=VOCAB, n_embd=64, n_inner=96, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.25)
_GEMMA = SIZES | dict(head_dim=32, tie_word_embeddings=True, query_pre_attn_scalar=32, sliding_window=16)
_WHOLE = {"rope_type": "default", "rope_theta": 10000.0}
_PARTIAL = {"rope_parameters": _WHOLE | {"partial_rotary_factor": 0.5}}
_GROWING = {"rope_parameters": _WHOLE | {"llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 16}}
_FIVE = {"num_hidden_layers": 5}
_TIED, _PAD, _RMS, _WINDOW = {"tie_word_embeddings": True}, {"pad_token_id": 0}, {"rms_norm_eps": 1e-3}, {"sliding_window": 16}
_WIDE = _RMS | {"head_dim": 32}
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_OF_EXPERTS = {"expert_count": 4, "expert_used_count": 2}
_OF_WINDOW = {"attention.sliding_window": 16}
_CAPS = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
_GEMMA4 = {key: value for key, value in _GEMMA.items() if key != "query_pre_attn_scalar"} | _FIVE | dict(
    global_head_dim=64, layer_types=["full_attention" if layer in (2, 4) else "sliding_attention" for layer in range(5)],
    vocab_size_per_layer_input=VOCAB, final_logit_softcapping=10.0,
)  # fmt: skip
_OF_GEMMA4 = _OF_WINDOW | {
    "attention.key_length": 64, "attention.value_length": 64, "attention.key_length_swa": 32, "attention.value_length_swa": 32,
    "rope.dimension_count": 64, "rope.dimension_count_swa": 32, "final_logit_softcapping": 10.0,
    "attention.sliding_window_pattern": [True, True, False, True, False],
}  # fmt: skip

# Architecture, and what makes the model another one of it → model type, config beside `SIZES`, keys beside those that every
# architecture has.
_MADE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16, **_RMS}, {}),
    "qwen2": ("qwen2", _RMS, {}),
    "qwen3": ("qwen3", _WIDE, {}),
    "qwen2moe": (
        "qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 64},
        {**_OF_EXPERTS, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64},
    ),
    "qwen3moe": (
        "qwen3_moe", {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True}, {**_OF_EXPERTS, "expert_feed_forward_length": 32}
    ),
    "gemma2": ("gemma2", _GEMMA | _CAPS, _CAPS | _OF_WINDOW),
    "gemma3": ("gemma3_text", _GEMMA | {"num_hidden_layers": 7}, _OF_WINDOW),
    "phi3": ("phi3", _PARTIAL | _PAD, {"rope.dimension_count": 8}),
    "stablelm": ("stablelm", _PARTIAL | {"layer_norm_eps": 1e-3}, {"rope.dimension_count": 8, "use_parallel_residual": False}),
    "gpt2": ("gpt2", _GPT2, {}),
    "starcoder2": ("starcoder2", {"norm_epsilon": 1e-3}, {}),
    "nemotron": ("nemotron", _PARTIAL | {"norm_eps": 1e-3}, {"rope.dimension_count": 8}),
    "smollm3": ("smollm3", _FIVE | _RMS | _PAD, {}),
    "mistral3": (
        "ministral3", _WIDE | _GROWING | _PAD, {"attention.temperature_scale": 0.7, "rope.scaling.original_context_length": 16}
    ),
    "granite": (
        "granite", dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.2, logits_scaling=3.0),
        {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.2, "logit_scale": 3.0},
    ),
    "gemma": ("gemma", _GEMMA | _RMS, {}),
    "arcee": ("arcee", {"head_dim": 16, **_RMS}, {}),
    "olmo2": ("olmo2", _RMS | _PAD, {}),
    "olmo2 with windows": (
        "olmo3", _FIVE | _WINDOW | _PAD, _OF_WINDOW | {"attention.sliding_window_pattern": [True, True, True, False, True]}
    ),
    "olmoe": (
        "olmoe", _PAD | dict(num_key_value_heads=4, num_experts=4, num_experts_per_tok=2, intermediate_size=32), _OF_EXPERTS
    ),
    "glm4": ("glm4", _WIDE | _PARTIAL | _PAD, {"rope.dimension_count": 16}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, **_RMS}, {}),
    "exaone4 of 64 layers": (
        "exaone4", _WINDOW | {"num_hidden_layers": 64, "sliding_window_pattern": 4, "initializer_range": 0.02}, _OF_WINDOW
    ),
    "ernie4_5": ("ernie4_5", _WIDE, {}),
    "hunyuan-dense": ("hunyuan_v1_dense", _WIDE, {}),
    "seed_oss": ("seed_oss", _WIDE | {"attention_out_bias": False}, {}),
    "command-r": ("cohere", _TIED | {"layer_norm_eps": 1e-3, "logit_scale": 0.3}, {"logit_scale": 0.3}),
    "command-r of 64 layers": (
        "cohere", _TIED | {"num_hidden_layers": 64, "initializer_range": 0.05, "use_qk_norm": True}, {"logit_scale": 0.0625}
    ),
    "cohere2": (
        "cohere2", _TIED | _FIVE | _WINDOW | {"layer_norm_eps": 1e-3, "logit_scale": 0.3}, _OF_WINDOW | {"logit_scale": 0.3}
    ),
    "gpt-oss": (
        "gpt_oss", _WINDOW | dict(head_dim=32, num_local_experts=4, num_experts_per_tok=2, rope_parameters=_WHOLE),
        _OF_EXPERTS | _OF_WINDOW | {"expert_feed_forward_length": 96},
    ),
    "gemma4": (
        "gemma4_text", _GEMMA4 | dict(hidden_size_per_layer_input=16, num_kv_shared_layers=2, use_double_wide_mlp=True),
        _OF_GEMMA4 | {"embedding_length_per_layer_input": 16, "attention.shared_kv_layers": 2,
                      "feed_forward_length": [96] * 3 + [192] * 2},
    ),
    "gemma4 with experts": (
        "gemma4_text",
        _GEMMA4 | dict(hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True,
                       num_experts=4, top_k_experts=2, moe_intermediate_size=32),
        _OF_GEMMA4 | _OF_EXPERTS | {"embedding_length_per_layer_input": 0, "attention.head_count_kv": [2, 2, 1, 2, 1],
                                    "expert_feed_forward_length": 32},
    ),
}  # fmt: skip
ARCHITECTURES = {
    name: (model_type, config if model_type == "gpt2" else SIZES | config, keys)
    for name, (model_type, config, keys) in _MADE.items()
}
_NEIGHBOURS = {"llama", "mistral3", "smollm3", "granite", "arcee"}
_LAYER_NORM = {"command-r", "cohere2", "stablelm", "gpt2", "starcoder2", "nemotron"}


@dataclass
class GgufFile:
    """A file's content: change it, then `write` it.

    ``keys``: with the architecture in front where it belongs. ``tensors``: fp32, as llama.cpp has them. ``model``: what it means.
    """

    model: PreTrainedModel
    keys: dict[str, Any]
    tensors: dict[str, NDArray[np.float32]]
    tokens: list[str] = field(default_factory=lambda: byte_tokens(VOCAB))

    def write(self, file: Path, order: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE, kind: str = "F32") -> Path:
        """``kind``: of matrices whose rows are whole blocks of it."""
        writer = gguf.GGUFWriter(file, str(self.keys["general.architecture"]), endianess=order)
        for key, value in self.keys.items():
            if key != "general.architecture":
                add_key(writer, key, value)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(self.tokens)
        control = {i for i, token in enumerate(self.tokens) if len(token) > 2 and token[0] in "<[_"}
        writer.add_token_types(
            [gguf.TokenType.CONTROL if i in control else gguf.TokenType.NORMAL for i in range(len(self.tokens))]
        )
        writer.add_token_merges(["Ġ Ġ"])
        for name, values in self.tensors.items():
            stored = gguf.GGMLQuantizationType[kind if values.ndim > 1 and values.shape[-1] % 32 == 0 else "F32"]
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A key in the type that llama.cpp reads it in; integers are uint32."""
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, kinds[type(value)])


def byte_tokens(count: int, controls: Iterable[str] = ("<|endoftext|>",)) -> list[str]:
    """GPT-2's 256 bytes, ``controls`` at the end, and made-up words between them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}
    tokens = [characters[byte] for byte in range(256)]
    ends = list(controls)
    return [*tokens, "ĠĠ", *(f"w{i}" for i in range(count - len(tokens) - 1 - len(ends))), *ends]


def tiny(name: str, config: Mapping[str, Any] | None = None, **keys: Any) -> GgufFile:
    """A random model of `ARCHITECTURES`; ``config`` over the table's, ``keys`` (without the architecture) over the file's."""
    model_type, settings, own_keys = ARCHITECTURES[name]
    architecture = name.split()[0]
    torch.manual_seed(0)
    made = AutoConfig.for_model(model_type, **{**settings, **(config or {})})
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or parameter.shape[0] <= 4:  # norms of ones and biases of zeros would hide what is missing
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if architecture == "gemma4" and name.endswith("q_norm.weight"):  # its scores are not scaled
                parameter.mul_(0.2)
    general = {**_keys(architecture, model), **own_keys, **keys}
    prefixed = {f"{architecture}.{key}": value for key, value in general.items() if value is not None}
    divisors = {}
    if architecture == "gemma4":  # a quarter of each head of the full layers rotates
        divisors = {"rope_freqs.weight": np.repeat(np.array([1, 1e30], np.float32), [8, 24])}
    return GgufFile(
        model,
        {"general.architecture": architecture, **prefixed, "tokenizer.ggml.eos_token_id": VOCAB - 1},
        {**_tensors(architecture, model), **divisors},
    )


def _keys(architecture: str, model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    epsilon = next(
        getattr(config, n)
        for n in ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
        if hasattr(config, n)
    )
    keys = {
        "context_length": CONTEXT,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None) or config.n_inner,
        "attention.head_count": config.num_attention_heads,
        f"attention.layer_norm_{'' if architecture in _LAYER_NORM else 'rms_'}epsilon": epsilon,
    }
    if architecture == "gpt2":
        return keys
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    parameters = config.rope_parameters
    return {
        **keys,
        "attention.head_count_kv": config.to_dict()["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": parameters.get("full_attention", parameters)["rope_theta"],
    }


def _tensors(architecture: str, model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    """The state dict under GGUF's names, with the converter's changes."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    found: dict[str, NDArray[np.float32]] = {}
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        values = tensor.numpy().astype(np.float32)
        if name == "lm_head.weight" and tied:
            continue
        if architecture == "gpt-oss" and ".experts." in name:
            found |= _experts_of_gpt_oss(name, values)
            continue
        if name.endswith("experts.gate_up_proj") and architecture != "gemma4":
            block = name.split(".")[2]
            found[f"blk.{block}.ffn_gate_exps.weight"], found[f"blk.{block}.ffn_up_exps.weight"] = np.split(values, 2, axis=1)
            continue
        if name.endswith(("experts.gate_up_proj", "experts.down_proj", "sinks", "layer_scalar")):
            name += ".weight"
        if ".router." in name and name.endswith("scale"):
            tensor = "ffn_down_exps" if name.endswith("per_expert_scale") else "ffn_gate_inp"
            found[f"blk.{name.split('.')[2]}.{tensor}.scale"] = values
            continue
        gguf_name = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        found[gguf_name] = _converted(architecture, gguf_name, values, model)
    return found


def _experts_of_gpt_oss(name: str, values: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    block, kind = f"blk.{name.split('.')[2]}.ffn_", "bias" if name.endswith("bias") else "weight"
    values = values if kind == "bias" else values.swapaxes(1, 2)
    if "down_proj" in name:
        return {f"{block}down_exps.{kind}": values}
    return {f"{block}gate_exps.{kind}": values[:, ::2], f"{block}up_exps.{kind}": values[:, 1::2]}


def _converted(architecture: str, name: str, values: NDArray[np.float32], model: PreTrainedModel) -> NDArray[np.float32]:
    config = model.config
    if architecture in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return values + 1
    if architecture in _NEIGHBOURS and (".attn_q." in name or ".attn_k." in name):  # they rotate neighbours, not halves
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if architecture == "gpt2" and values.ndim == 2 and name.startswith("blk."):
        return values.T
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return values[0]
    return values
