"""The model config that a GGUF file's keys describe, for each architecture that was held against llama.cpp.

transformers maps some of the keys and leaves its classes' defaults for the others, which are those of one model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import filter as matching
from typing import Any

from tide_runtime.errors import ModelFilesError, UnsupportedModelError
from transformers import AutoConfig, PreTrainedConfig

from tide_export.sources.gguf import gguf_recurrent as recurrent
from tide_export.sources.gguf.gguf_file import GgufTensor
from tide_export.sources.gguf.gguf_metadata import REQUIRED, Metadata
from tide_export.sources.gguf.gguf_rope import rope_parameters

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

_FULL = "full_attention"

Values = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How an architecture's keys become a config.

    Args:
        model_type: transformers' name of it; ``more`` may give another.
        flags: config attribute → the tensor that a file with it has, in the layer * in any. With _ in front: how many tensors.
        epsilon: the key of the norms' epsilon, and the config's attribute.
        partial_rotary: whether a part of each head may rotate.
        rotates: whether queries and keys rotate at all.
        scales: whether ``more`` takes the scale of scores; else it is 1/√head_dim.
        windows: whether ``more`` takes the sliding window; else every layer attends to the whole context.
        sizes: keys of widths, and the config's attributes; ``more`` takes the others.
        heads: whether the heads of all layers are alike; else ``more`` takes them.
        mixed: whether layers may be without attention or feed-forward block, and all without the width of the latter.
        more: what else the architecture's keys say: (keys, values so far) → values.
    """

    model_type: str
    flags: Mapping[str, str] = field(default_factory=dict)
    epsilon: tuple[str, str] = (_RMS, "rms_norm_eps")
    partial_rotary: bool = False
    rotates: bool = True
    scales: bool = False
    windows: bool = False
    sizes: Mapping[str, str] = field(default_factory=lambda: _SIZES)
    heads: bool = True
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
        for key, attribute in found.sizes.items()
    }
    values[found.epsilon[1]] = keys.take(found.epsilon[0])
    values["vocab_size"] = _vocabulary(keys, tensors)
    values["tie_word_embeddings"] = "output.weight" not in tensors
    for attribute, tensor in found.flags.items():
        count = len(matching(tensors, tensor))
        values[attribute] = count if attribute.startswith("_") else count > 0
    values |= _token_ids(keys, values["vocab_size"])
    if found.heads:
        values |= _heads(keys, values, found, tensors)
    values |= found.more(keys, values)
    keys.check_all_taken()
    return AutoConfig.for_model(values.pop("model_type", found.model_type), **values)


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
    if not architecture.windows:
        _check_whole_context(keys, values)
    found = {
        "num_key_value_heads": keys.take_number("attention.head_count_kv", heads, architecture.mixed),
        "head_dim": head_dim,
    }
    if architecture.rotates:
        return {**found, "rope_parameters": rope_parameters(keys, head_dim, architecture.partial_rotary, tensors)}
    keys.take_all("rope.")
    return found


def _check_whole_context(keys: Metadata, values: Values) -> None:
    window = keys.take("attention.sliding_window", 0)
    if window and window < values["max_position_embeddings"]:
        raise keys.refused("attention.sliding_window", "is shorter than the context, and the model attends to all of it")


def _gpt2(keys: Metadata, values: Values) -> Values:
    heads = values["num_attention_heads"]
    if keys.take_number("attention.head_count_kv", heads) != heads:
        raise keys.refused("attention.head_count_kv", "is fewer than the query heads, and GPT-2 has as many")
    return {"n_inner": values.pop("intermediate_size")}


def _phi3(keys: Metadata, values: Values) -> Values:
    """transformers takes the original context's length from the config itself, whatever the rotary parameters say.

    llama.cpp reads the window and attends to the whole context all the same.
    """
    keys.take("attention.sliding_window", 0)
    original = values["rope_parameters"].get("original_max_position_embeddings", values["max_position_embeddings"])
    return {"original_max_position_embeddings": original}


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
    if keys.take("rope.scaling.attn_factor", 1.0) != 1.0:
        raise keys.refused("rope.scaling.attn_factor", "scales attention in local layers too, whose positions are not scaled")
    local = {"rope_type": "default", "rope_theta": float(keys.take("rope.freq_base_swa", 10000.0))}
    parameters = {_FULL: scaled, "sliding_attention": local}
    caps = {"final_logit_softcapping": keys.take("final_logit_softcapping", 0) or None}
    return {**caps, "rope_parameters": parameters, **_gemma_layers(keys, values, every=6, whole_model=62)}


def _gemma4(keys: Metadata, values: Values) -> Values:
    layers = values["num_hidden_layers"]
    full = keys.take("attention.key_length")
    local = keys.take("attention.key_length_swa")
    for key, usual in {
        "attention.value_length": full,
        "attention.value_length_swa": local,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": local,
        "rope.scaling.attn_factor": 1.0,
    }.items():
        if keys.take(key, usual) != usual:
            raise keys.refused(key, f"is not {usual}, and the model has no other")
    windows = _local_layers(keys, values, every=6)
    is_full = [kind == _FULL for kind in windows["layer_types"]]
    if not is_full[-1]:
        raise keys.refused("attention.sliding_window_pattern", "makes the last layer a local one, which it never is")
    counts = keys.take_each("attention.head_count_kv", layers, values["num_attention_heads"])
    heads = {kind: {count for count, flag in zip(counts, is_full, strict=True) if flag == kind} for kind in (True, False)}
    if any(len(found) > 1 for found in heads.values()):
        raise keys.refused("attention.head_count_kv", "differs between layers of a kind")
    whole = {"head_dim": full, "num_key_value_heads": heads[True].pop()}
    return {
        **windows,
        **_gemma4_blocks(keys, values),
        "head_dim": local,
        "num_key_value_heads": (heads[False] or {whole["num_key_value_heads"]}).pop(),
        "per_layer_config": {layer: whole for layer, flag in enumerate(is_full) if flag},
        "attention_k_eq_v": values.pop("_values") < values.pop("_keys"),
        "rope_parameters": {
            _FULL: rope_parameters(keys, full, False, {}),
            "sliding_attention": {"rope_type": "default", "rope_theta": float(keys.take("rope.freq_base_swa", 10000.0))},
        },
        "final_logit_softcapping": keys.take("final_logit_softcapping", 30.0) or None,
    }


def _gemma4_blocks(keys: Metadata, values: Values) -> Values:
    """Experts, inputs of each layer, and widths: blocks of layers that take the keys of earlier ones may be twice as wide."""
    layers = values["num_hidden_layers"]
    shared = keys.take("attention.shared_kv_layers", 0)
    widths = keys.take_each(_FEED_FORWARD, layers)
    experts = keys.take("expert_count", 0)
    first = widths[0]
    double = widths == [first] * (layers - shared) + [2 * first] * shared and shared > 0
    if not double and widths != [first] * layers:
        raise keys.refused(_FEED_FORWARD, "is not one width, doubled where layers take the keys of earlier ones")
    return {
        "intermediate_size": first,
        "use_double_wide_mlp": double,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": keys.take("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": values["vocab_size"],
        "enable_moe_block": experts > 0,
        "num_experts": experts,
        "top_k_experts": keys.take("expert_used_count", 0),
        "moe_intermediate_size": keys.take("expert_feed_forward_length", 0),
    }


def _gemma_layers(keys: Metadata, values: Values, every: int, whole_model: int, **default: int) -> Values:
    """The layers' windows, and the scale of scores: 1/√(embedding / heads) in the largest model of a kind, else 1/√head_dim."""
    largest = values["num_hidden_layers"] == whole_model
    scalar = values["hidden_size"] // values["num_attention_heads"] if largest else values["head_dim"]
    return {**_local_layers(keys, values, every, **default), "query_pre_attn_scalar": scalar}


def _local_layers(keys: Metadata, values: Values, every: int, **default: int) -> Values:
    """The window, and the layers that it holds for: all but one of ``every``, or those that the file names."""
    layers = values["num_hidden_layers"]
    pattern = keys.take("attention.sliding_window_pattern", every)
    local = [bool(flag) for flag in pattern] if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(layers)]
    if len(local) != layers:
        raise keys.refused("attention.sliding_window_pattern", f"does not have one value for each of {layers} layers")
    window = keys.take("attention.sliding_window", *default.values())
    if not window:
        raise keys.refused("attention.sliding_window", "leaves local layers nothing to attend to")
    return {"sliding_window": window, "layer_types": ["sliding_attention" if is_local else _FULL for is_local in local]}


def _exaone4(keys: Metadata, values: Values) -> Values:
    """llama.cpp has windows in the model of 64 layers only."""
    if values["num_hidden_layers"] == 64:
        return _local_layers(keys, values, every=4, default_window=4096)
    _check_whole_context(keys, values)
    return {"sliding_window": None, "layer_types": [_FULL] * values["num_hidden_layers"]}


def _olmo2(keys: Metadata, values: Values) -> Values:
    """Olmo 3 is the same with windows; the positions of its local layers are not scaled."""
    if not keys.take("attention.sliding_window", 0):
        return {}
    scaled = values.pop("rope_parameters")
    parameters = {_FULL: scaled, "sliding_attention": {"rope_type": "default", "rope_theta": scaled["rope_theta"]}}
    return {"model_type": "olmo3", "rope_parameters": parameters, **_local_layers(keys, values, every=4)}


def _cohere(keys: Metadata, values: Values) -> Values:
    return {"logit_scale": keys.take("logit_scale", 0) or 1.0}


def _cohere2(keys: Metadata, values: Values) -> Values:
    return {**_cohere(keys, values), **_local_layers(keys, values, every=4)}


def _granite(keys: Metadata, values: Values) -> Values:
    if not keys.take("rope.scaling.finetuned", True):  # llama.cpp's switch of all rotation
        raise keys.refused("rope.scaling.finetuned", "is false, and queries and keys of the model rotate")
    return recurrent.granite_multipliers(keys, values)


def _mistral3(keys: Metadata, values: Values) -> Values:
    """Queries grow with the logarithm of their position: `attention.temperature_scale`."""
    original = keys.take("rope.scaling.original_context_length", values["max_position_embeddings"])
    growth = {"llama_4_scaling_beta": keys.take("attention.temperature_scale", 0.0), "original_max_position_embeddings": original}
    return {"rope_parameters": {**values["rope_parameters"], **growth}}


def _gpt_oss(keys: Metadata, values: Values) -> Values:
    values["intermediate_size"] = keys.take("expert_feed_forward_length")
    experts = {"num_local_experts": keys.take("expert_count"), "num_experts_per_tok": keys.take("expert_used_count")}
    return {**experts, **_local_layers(keys, values, every=2)}


def _experts(keys: Metadata, normalised: bool) -> Values:
    """``normalised``: whether llama.cpp lets the weights of the chosen experts sum to one, whatever the file says."""
    if keys.take("expert_gating_func", 1) != 1:
        raise keys.refused("expert_gating_func", "is not softmax (1), by which the model chooses its experts")
    if bool(keys.take("expert_weights_norm", normalised)) != normalised:
        raise keys.refused("expert_weights_norm", f"is not {normalised}, which the architecture is computed with")
    return {**{attribute: keys.take(key) for key, attribute in _MOE.items()}, "norm_topk_prob": normalised}


def _qwen2moe(keys: Metadata, values: Values) -> Values:
    shared = keys.take("expert_shared_feed_forward_length", values["intermediate_size"])
    return {**_qwen_experts(keys, values, normalised=False), "shared_expert_intermediate_size": shared}


def _qwen3moe(keys: Metadata, values: Values) -> Values:
    return _qwen_experts(keys, values, normalised=True)


def _qwen_experts(keys: Metadata, values: Values, normalised: bool) -> Values:
    found = _experts(keys, normalised)
    width = values["intermediate_size"] // found["num_experts_per_tok"]
    return {**found, "moe_intermediate_size": keys.take("expert_feed_forward_length", width)}


def _olmoe(keys: Metadata, values: Values) -> Values:
    return _experts(keys, normalised=False)


_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_CONVOLUTION_BIAS = {"mamba_conv_bias": "blk.*.ssm_conv1d.bias"}
_NEMOTRON_H = Architecture(
    "nemotron_h",
    {"use_conv_bias": "blk.*.ssm_conv1d.bias", "mlp_bias": "blk.*.ffn_up.bias"},
    (_RMS, "layer_norm_epsilon"),
    rotates=False,
    mixed=True,
    more=recurrent.nemotron_h,
)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"}),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", more=_qwen2moe),
    "qwen3": Architecture("qwen3", _ATTENTION_BIAS),
    "qwen3moe": Architecture("qwen3_moe", _ATTENTION_BIAS, more=_qwen3moe),
    "gemma2": Architecture("gemma2", windows=True, more=_gemma2),
    "gemma3": Architecture("gemma3_text", windows=True, more=_gemma3),
    "phi3": Architecture("phi3", partial_rotary=True, windows=True, more=_phi3),
    "stablelm": Architecture(
        "stablelm",
        {"use_qkv_bias": "blk.0.attn_q.bias", "_has_ffn_norm": "blk.0.ffn_norm.weight"},
        (_LAYER_NORM, "layer_norm_eps"),
        partial_rotary=True,
        more=_stablelm,
    ),
    "smollm3": Architecture("smollm3", {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"}),
    "mistral3": Architecture("ministral3", more=_mistral3),
    "granite": Architecture("granite", {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"}, scales=True, more=_granite),
    "gemma": Architecture("gemma"),
    "arcee": Architecture("arcee", {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"}),
    "olmo2": Architecture("olmo2", _ATTENTION_BIAS, windows=True, more=_olmo2),
    "olmoe": Architecture("olmoe", _ATTENTION_BIAS, more=_olmoe),
    "glm4": Architecture("glm4", _ATTENTION_BIAS, partial_rotary=True),
    "exaone4": Architecture("exaone4", windows=True, more=_exaone4),
    "ernie4_5": Architecture("ernie4_5"),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", _ATTENTION_BIAS),
    "seed_oss": Architecture("seed_oss", {**_ATTENTION_BIAS, "attention_out_bias": "blk.0.attn_output.bias"}),
    "command-r": Architecture(
        "cohere", {**_ATTENTION_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"}, (_LAYER_NORM, "layer_norm_eps"), more=_cohere
    ),
    "cohere2": Architecture("cohere2", _ATTENTION_BIAS, (_LAYER_NORM, "layer_norm_eps"), windows=True, more=_cohere2),
    "gemma4": Architecture(
        "gemma4_text",
        {"_keys": "blk.*.attn_k.weight", "_values": "blk.*.attn_v.weight"},
        sizes={key: attribute for key, attribute in _SIZES.items() if key != _FEED_FORWARD},
        heads=False,
        more=_gemma4,
    ),
    "gpt-oss": Architecture("gpt_oss", windows=True, mixed=True, more=_gpt_oss),
    "gpt2": Architecture("gpt2", epsilon=(_LAYER_NORM, "layer_norm_epsilon"), heads=False, more=_gpt2),
    "starcoder2": Architecture("starcoder2", {"use_bias": "blk.0.attn_q.bias"}, (_LAYER_NORM, "norm_epsilon")),
    "nemotron": Architecture(
        "nemotron", {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"}, (_LAYER_NORM, "norm_eps"), partial_rotary=True
    ),
    "qwen35": Architecture("qwen3_5_text", partial_rotary=True, more=recurrent.qwen35),
    "qwen35moe": Architecture("qwen3_5_moe_text", partial_rotary=True, mixed=True, more=recurrent.qwen35_moe),
    "qwen3next": Architecture("qwen3_next", partial_rotary=True, more=recurrent.qwen3_next),
    "lfm2": Architecture("lfm2", epsilon=(_RMS, "norm_eps"), mixed=True, more=recurrent.lfm2),
    "lfm2moe": Architecture(
        "lfm2_moe", {"use_expert_bias": "blk.*.exp_probs_b.bias"}, (_RMS, "norm_eps"), mixed=True, more=recurrent.lfm2_moe
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {"attention_bias": "blk.*.attn_q.bias", **_CONVOLUTION_BIAS},
        rotates=False,
        scales=True,
        mixed=True,
        more=recurrent.granite_hybrid,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
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
        {"use_conv_bias": "blk.*.ssm_conv1d.bias"},
        (_RMS, "layer_norm_epsilon"),
        heads=False,
        more=recurrent.mamba2,
    ),
}
