"""The model config that a GGUF file's keys describe, for each architecture that was held against llama.cpp.

transformers maps some of the keys and leaves its classes' defaults for the others, which are those of one model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import filter as matching
from typing import Any

from tide_runtime.errors import ModelFilesError, UnsupportedModelError
from transformers import AutoConfig, PreTrainedConfig

from tide_export.quantization import gguf_recurrent as recurrent
from tide_export.quantization.gguf_file import GgufTensor
from tide_export.quantization.gguf_metadata import REQUIRED, Metadata
from tide_export.quantization.gguf_rope import rope_parameters

_FEED_FORWARD = "feed_forward_length"
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    _FEED_FORWARD: "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_RMS, _LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_MOE = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}

Values = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How an architecture's keys become a config.

    Args:
        model_type: transformers' name of it.
        epsilon: the key of the norms' epsilon, and the config's attribute.
        flags: config attribute → the tensor that a file with it has, in the layer * in any.
        partial_rotary: whether a part of each head may rotate.
        rotates: whether queries and keys rotate at all.
        scales: whether ``more`` takes the scale of scores; else it is 1/√head_dim.
        attends: whether any layer attends.
        mixed: whether layers may be without attention or feed-forward block, and all without the width of the latter.
        more: what else the architecture's keys say: (keys, values so far) → values.
    """

    model_type: str
    epsilon: tuple[str, str]
    flags: Mapping[str, str] = field(default_factory=dict)
    partial_rotary: bool = False
    rotates: bool = True
    scales: bool = False
    attends: bool = True
    mixed: bool = False
    more: Callable[[Metadata, Values], Values] = lambda keys, values: {}


def read_config(keys: Metadata, tensors: Mapping[str, GgufTensor]) -> PreTrainedConfig:
    """The config of the file's model.

    Raises ModelFilesError for a missing key, UnsupportedModelError for an architecture or a key that has no place in the config.
    """
    if keys.full("general.type") not in (None, "model"):
        raise keys.refused("general.type", "is no language model")
    found = ARCHITECTURES.get(keys.architecture)
    if keys.take("num_loops", 1) != 1:
        raise keys.refused("num_loops", "runs the layers several times, which is read from HuggingFace checkpoints only")
    if found is None:
        raise UnsupportedModelError(
            f"{keys.file} has the architecture {keys.architecture!r}; GGUF files of {', '.join(ARCHITECTURES)} are read, and of "
            "others their HuggingFace checkpoint"
        )
    values: Values = {
        attribute: keys.take_number(key, 0 if found.mixed and key == _FEED_FORWARD else REQUIRED, found.mixed)
        for key, attribute in _SIZES.items()
    }
    values[found.epsilon[1]] = keys.take(found.epsilon[0])
    values["vocab_size"] = _vocabulary(keys, tensors)
    values["tie_word_embeddings"] = "output.weight" not in tensors
    values |= {attribute: bool(matching(tensors, tensor)) for attribute, tensor in found.flags.items()}
    values |= _token_ids(keys, values["vocab_size"])
    if found.attends:
        values |= _gpt2(keys, values) if keys.architecture == "gpt2" else _heads(keys, values, found, tensors)
    values |= found.more(keys, values)
    keys.check_all_taken()
    return AutoConfig.for_model(found.model_type, **values)


def _vocabulary(keys: Metadata, tensors: Mapping[str, GgufTensor]) -> int:
    if "token_embd.weight" not in tensors:
        raise ModelFilesError(f"{keys.file} has no tensor token_embd.weight, the embedding; download it again")
    rows = tensors["token_embd.weight"].shape[0]
    if keys.take("vocab_size", rows) != rows:
        raise ModelFilesError(
            f"{keys.file} has {keys.architecture}.vocab_size = {keys.take('vocab_size')} and an embedding of {rows} tokens; "
            "convert the model again"
        )
    return rows


def _token_ids(keys: Metadata, vocabulary: int) -> Values:
    """Ids of the config; an id beyond the vocabulary has no row that could be looked up."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {attribute: keys.full(f"tokenizer.ggml.{name}_token_id") for attribute, name in names.items()}
    return {attribute: number if number is not None and number < vocabulary else None for attribute, number in ids.items()}


def _heads(keys: Metadata, values: Values, architecture: Architecture, tensors: Mapping[str, GgufTensor]) -> Values:
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    if not heads or (hidden % heads and keys.take("attention.key_length", None) is None):
        raise UnsupportedModelError(
            f"{keys.file}: its embedding length {hidden} is no multiple of the number of attention heads ({heads})"
        )
    head_dim = keys.take_number("attention.key_length", hidden // heads)
    if keys.take_number("attention.value_length", head_dim) != head_dim:
        raise keys.refused("attention.value_length", "differs from the keys' length, and the model has one length for both")
    if keys.architecture == "stablelm" and head_dim * heads != hidden:
        raise keys.refused("attention.key_length", f"is not {hidden} / {heads}, the only length that the model has")
    scale = None if architecture.scales else keys.take("attention.scale", None)
    if scale and abs(scale * head_dim**0.5 - 1) > 1e-4:
        raise keys.refused("attention.scale", f"is not 1/√{head_dim}, and the model has no other")
    window = keys.take("attention.sliding_window", 0)
    if window and window < values["max_position_embeddings"] and keys.architecture not in _WINDOWS:
        raise keys.refused("attention.sliding_window", "is shorter than the context, and the model attends to all of it")
    found = {
        "num_key_value_heads": keys.take_number("attention.head_count_kv", heads, architecture.mixed),
        "head_dim": head_dim,
    }
    if architecture.rotates:
        return {**found, "rope_parameters": rope_parameters(keys, head_dim, architecture.partial_rotary, tensors)}
    keys.take_all("rope.")
    return found


def _gpt2(keys: Metadata, values: Values) -> Values:
    heads = values["num_attention_heads"]
    if keys.take_number("attention.head_count_kv", heads) != heads:
        raise keys.refused("attention.head_count_kv", "is fewer than the query heads, and GPT-2 has as many")
    return {"n_inner": values.pop("intermediate_size")}


def _window(keys: Metadata, values: Values) -> Values:
    return {"sliding_window": keys.take("attention.sliding_window", 0) or None}


def _phi3(keys: Metadata, values: Values) -> Values:
    """transformers takes the original context's length from the config itself, whatever the rotary parameters say."""
    original = values["rope_parameters"].get("original_max_position_embeddings", values["max_position_embeddings"])
    return {**_window(keys, values), "original_max_position_embeddings": original}


def _stablelm(keys: Metadata, values: Values) -> Values:
    parallel = not values.pop("_has_ffn_norm")
    if keys.take("use_parallel_residual", parallel) != parallel:
        raise keys.refused("use_parallel_residual", "contradicts the tensors: a parallel block has no ffn_norm")
    return {"use_parallel_residual": parallel}


def _gemma2(keys: Metadata, values: Values) -> Values:
    caps = {name: keys.take(name, default) or None for name, default in _GEMMA2_CAPS.items()}
    return {**caps, **_gemma_layers(keys, values, every=2, whole_model=46, default_window=4096)}


def _gemma3(keys: Metadata, values: Values) -> Values:
    scaled = values.pop("rope_parameters")
    local = {"rope_type": "default", "rope_theta": float(keys.take("rope.freq_base_swa", 10000.0))}
    parameters = {"full_attention": scaled, "sliding_attention": local}
    caps = {"final_logit_softcapping": keys.take("final_logit_softcapping", 0) or None}
    return {**caps, "rope_parameters": parameters, **_gemma_layers(keys, values, every=6, whole_model=62)}


def _gemma_layers(keys: Metadata, values: Values, every: int, whole_model: int, **default: int) -> Values:
    """The layers' windows, and the scale of scores: 1/√(embedding / heads) in the largest model of a kind, else 1/√head_dim."""
    layers, pattern = values["num_hidden_layers"], keys.take("attention.sliding_window_pattern", every)
    local = [bool(flag) for flag in pattern] if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(layers)]
    if len(local) != layers:
        raise keys.refused("attention.sliding_window_pattern", f"does not have one value for each of {layers} layers")
    largest = layers == whole_model
    return {
        "sliding_window": keys.take("attention.sliding_window", *default.values()),
        "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in local],
        "query_pre_attn_scalar": values["hidden_size"] // values["num_attention_heads"] if largest else values["head_dim"],
    }


def _experts(keys: Metadata, values: Values) -> Values:
    found: Values = {attribute: keys.take(key) for key, attribute in _MOE.items()}
    width = values["intermediate_size"]
    found["moe_intermediate_size"] = keys.take("expert_feed_forward_length", width // found["num_experts_per_tok"])
    if keys.take("expert_gating_func", 1) != 1:
        raise keys.refused("expert_gating_func", "is not softmax (1), by which the model chooses its experts")
    return found


def _qwen2moe(keys: Metadata, values: Values) -> Values:
    shared = keys.take("expert_shared_feed_forward_length", values["intermediate_size"])
    return {**_experts(keys, values), "shared_expert_intermediate_size": shared, **_normalised(keys, False)}


def _qwen3moe(keys: Metadata, values: Values) -> Values:
    return {**_experts(keys, values), **_normalised(keys, True)}


def _normalised(keys: Metadata, usual: bool) -> Values:
    """Whether the chosen experts' weights sum to one."""
    return {"norm_topk_prob": bool(keys.take("expert_weights_norm", usual))}


_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_WINDOWS: Collection[str] = ("gemma2", "gemma3", "phi3", "starcoder2")
_CONVOLUTION_BIAS = {"mamba_conv_bias": "blk.*.ssm_conv1d.bias"}
_NEMOTRON_H = Architecture(
    "nemotron_h",
    (_RMS, "layer_norm_epsilon"),
    {"use_conv_bias": "blk.*.ssm_conv1d.bias", "mlp_bias": "blk.*.ffn_up.bias"},
    rotates=False,
    mixed=True,
    more=recurrent.nemotron_h,
)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", (_RMS, "rms_norm_eps"), {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"}),
    "qwen2": Architecture("qwen2", (_RMS, "rms_norm_eps")),
    "qwen2moe": Architecture("qwen2_moe", (_RMS, "rms_norm_eps"), more=_qwen2moe),
    "qwen3": Architecture("qwen3", (_RMS, "rms_norm_eps"), _ATTENTION_BIAS),
    "qwen3moe": Architecture("qwen3_moe", (_RMS, "rms_norm_eps"), _ATTENTION_BIAS, more=_qwen3moe),
    "gemma2": Architecture("gemma2", (_RMS, "rms_norm_eps"), more=_gemma2),
    "gemma3": Architecture("gemma3_text", (_RMS, "rms_norm_eps"), more=_gemma3),
    "phi3": Architecture("phi3", (_RMS, "rms_norm_eps"), partial_rotary=True, more=_phi3),
    "stablelm": Architecture(
        "stablelm",
        (_LAYER_NORM, "layer_norm_eps"),
        {"use_qkv_bias": "blk.0.attn_q.bias", "_has_ffn_norm": "blk.0.ffn_norm.weight"},
        partial_rotary=True,
        more=_stablelm,
    ),
    "gpt2": Architecture("gpt2", (_LAYER_NORM, "layer_norm_epsilon")),
    "starcoder2": Architecture("starcoder2", (_LAYER_NORM, "norm_epsilon"), {"use_bias": "blk.0.attn_q.bias"}, more=_window),
    "nemotron": Architecture(
        "nemotron", (_LAYER_NORM, "norm_eps"), {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"}, partial_rotary=True
    ),
    "qwen35": Architecture("qwen3_5_text", (_RMS, "rms_norm_eps"), partial_rotary=True, more=recurrent.qwen35),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", (_RMS, "rms_norm_eps"), partial_rotary=True, mixed=True, more=recurrent.qwen35_moe
    ),
    "qwen3next": Architecture("qwen3_next", (_RMS, "rms_norm_eps"), partial_rotary=True, more=recurrent.qwen3_next),
    "lfm2": Architecture("lfm2", (_RMS, "norm_eps"), mixed=True, more=recurrent.lfm2),
    "lfm2moe": Architecture(
        "lfm2_moe", (_RMS, "norm_eps"), {"use_expert_bias": "blk.*.exp_probs_b.bias"}, mixed=True, more=recurrent.lfm2_moe
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        (_RMS, "rms_norm_eps"),
        {"attention_bias": "blk.*.attn_q.bias", **_CONVOLUTION_BIAS},
        rotates=False,
        scales=True,
        mixed=True,
        more=recurrent.granite,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        (_RMS, "rms_norm_eps"),
        {
            **_ATTENTION_BIAS,
            **_CONVOLUTION_BIAS,
            "mlp_bias": "blk.0.ffn_gate.bias",
            "mamba_rms_norm": "blk.0.ssm_norm.weight",
        },
        more=recurrent.falcon_h1,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "mamba2": Architecture(
        "mamba2",
        (_RMS, "layer_norm_epsilon"),
        {"use_conv_bias": "blk.*.ssm_conv1d.bias"},
        attends=False,
        more=recurrent.mamba2,
    ),
}
