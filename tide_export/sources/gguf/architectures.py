"""The model config that a GGUF file's keys describe, for each architecture that was held against llama.cpp.

transformers maps some of the keys and leaves its classes' defaults for the others, which are those of one model.

Keys of recurrent models: `load_arch_hparams` in src/models/{qwen35,qwen3next,lfm2,granite-hybrid,falcon-h1,nemotron-h,mamba2}.cpp
of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tide_runtime.errors import UnsupportedModelError
from transformers import PreTrainedConfig

from tide_export.sources.gguf.config import (
    FEED_FORWARD,
    RMS_EPSILON,
    SIZES,
    Architecture,
    Values,
    check_whole_context,
    rope_parameters,
)
from tide_export.sources.gguf.file import REQUIRED, GgufTensor, Metadata

_FULL, _LOCAL, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_DELTA_EPSILON = 1e-6  # for normalizing queries and keys; transformers has this number, llama.cpp that of the other norms
_KEY_HEADS = "attention.head_count_kv"


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
    return found.config(keys, tensors)


def _gpt2(keys: Metadata, values: Values) -> Values:
    heads = values["num_attention_heads"]
    if keys.take_number(_KEY_HEADS, heads) != heads:
        raise keys.refused(_KEY_HEADS, "is fewer than the query heads, and GPT-2 has as many")
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
    return {**caps, **_gemma_layers(keys, values, every=2, whole_model=46, window=4096)}


def _gemma3(keys: Metadata, values: Values) -> Values:
    scaled = values.pop("rope_parameters")
    if keys.take("rope.scaling.attn_factor", 1.0) != 1.0:
        raise keys.refused("rope.scaling.attn_factor", "scales attention in local layers too, whose positions are not scaled")
    return {
        "final_logit_softcapping": keys.take("final_logit_softcapping", 0) or None,
        "rope_parameters": _by_layer_type(scaled, keys.take("rope.freq_base_swa", 10000.0)),
        **_gemma_layers(keys, values, every=6, whole_model=62),
    }


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
    counts = keys.take_each(_KEY_HEADS, layers, values["num_attention_heads"])
    heads = {kind: {count for count, flag in zip(counts, is_full, strict=True) if flag == kind} for kind in (True, False)}
    if any(len(found) > 1 for found in heads.values()):
        raise keys.refused(_KEY_HEADS, "differs between layers of a kind")
    whole = {"head_dim": full, "num_key_value_heads": heads[True].pop()}
    return {
        **windows,
        **_gemma4_blocks(keys, values),
        "head_dim": local,
        "num_key_value_heads": (heads[False] or {whole["num_key_value_heads"]}).pop(),
        "per_layer_config": {layer: whole for layer, flag in enumerate(is_full) if flag},
        "attention_k_eq_v": values.pop("_values") < values.pop("_keys"),
        "rope_parameters": _by_layer_type(rope_parameters(keys, full, False, {}), keys.take("rope.freq_base_swa", 10000.0)),
        "final_logit_softcapping": keys.take("final_logit_softcapping", 30.0) or None,
    }


def _gemma4_blocks(keys: Metadata, values: Values) -> Values:
    """Experts, inputs of each layer, and widths: blocks of layers that take the keys of earlier ones may be twice as wide."""
    layers = values["num_hidden_layers"]
    shared = keys.take("attention.shared_kv_layers", 0)
    widths = keys.take_each(FEED_FORWARD, layers)
    experts = keys.take("expert_count", 0)
    first = widths[0]
    double = widths == [first] * (layers - shared) + [2 * first] * shared and shared > 0
    if not double and widths != [first] * layers:
        raise keys.refused(FEED_FORWARD, "is not one width, doubled where layers take the keys of earlier ones")
    return {
        "intermediate_size": first,
        "use_double_wide_mlp": double,
        "num_kv_shared_layers": shared,
        "vocab_size_per_layer_input": values["vocab_size"],
        "enable_moe_block": experts > 0,
        "num_experts": experts,
        "top_k_experts": keys.take("expert_used_count", 0),
        "moe_intermediate_size": keys.take("expert_feed_forward_length", 0),
    }


def _by_layer_type(full: Values, local_base: float) -> Values:
    """Rotary parameters of ``full`` layers, and of local ones, whose positions are not scaled."""
    return {_FULL: full, _LOCAL: {"rope_type": "default", "rope_theta": float(local_base)}}


def _gemma_layers(keys: Metadata, values: Values, every: int, whole_model: int, window: Any = REQUIRED) -> Values:
    """The layers' windows, and the scale of scores: 1/√(embedding / heads) in the largest model of a kind, else 1/√head_dim."""
    largest = values["num_hidden_layers"] == whole_model
    scalar = values["hidden_size"] // values["num_attention_heads"] if largest else values["head_dim"]
    return {**_local_layers(keys, values, every, window), "query_pre_attn_scalar": scalar}


def _local_layers(keys: Metadata, values: Values, every: int, window: Any = REQUIRED) -> Values:
    """The window, and the layers that it holds for: all but one of ``every``, or those that the file names."""
    key = "attention.sliding_window_pattern"
    layers = values["num_hidden_layers"]
    pattern = keys.take(key, every)
    local = keys.take_each(key, layers) if isinstance(pattern, list) else _all_but_each(pattern, layers)
    window = keys.take("attention.sliding_window", window)
    if not window:
        raise keys.refused("attention.sliding_window", "leaves local layers nothing to attend to")
    return {"sliding_window": window, "layer_types": [_LOCAL if is_local else _FULL for is_local in local]}


def _all_but_each(every: int, layers: int) -> list[bool]:
    """False for the last of ``every`` layers."""
    return [(layer + 1) % every != 0 for layer in range(layers)]


def _exaone4(keys: Metadata, values: Values) -> Values:
    """llama.cpp has windows in the model of 64 layers only."""
    if values["num_hidden_layers"] == 64:
        return _local_layers(keys, values, every=4, window=4096)
    check_whole_context(keys, values)
    return {"sliding_window": None, "layer_types": [_FULL] * values["num_hidden_layers"]}


def _olmo2(keys: Metadata, values: Values) -> Values:
    """Olmo 3 is the same with windows; the positions of its local layers are not scaled."""
    if not keys.take("attention.sliding_window", 0):
        return {}
    scaled = values.pop("rope_parameters")
    parameters = _by_layer_type(scaled, scaled["rope_theta"])
    return {"model_type": "olmo3", "rope_parameters": parameters, **_local_layers(keys, values, every=4)}


def _scale(keys: Metadata, key: str) -> float:
    """The factor ``key``, which is 0 in a file that has none."""
    return keys.take(key, 0) or 1.0


def _cohere(keys: Metadata, values: Values) -> Values:
    return {"logit_scale": _scale(keys, "logit_scale")}


def _cohere2(keys: Metadata, values: Values) -> Values:
    return {**_cohere(keys, values), **_local_layers(keys, values, every=4)}


def _granite(keys: Metadata, values: Values) -> Values:
    if not keys.take("rope.scaling.finetuned", True):  # llama.cpp's switch of all rotation
        raise keys.refused("rope.scaling.finetuned", "is false, and queries and keys of the model rotate")
    return _granite_multipliers(keys, values)


def _granite_multipliers(keys: Metadata, values: Values) -> Values:
    return {
        "attention_multiplier": keys.take("attention.scale", 0) or values["head_dim"] ** -0.5,
        "embedding_multiplier": _scale(keys, "embedding_scale"),
        "residual_multiplier": _scale(keys, "residual_scale"),
        "logits_scaling": _scale(keys, "logit_scale"),
    }


def _granite_hybrid(keys: Metadata, values: Values) -> Values:
    """A layer without keys and values is recurrent."""
    if keys.take("rope.scaling.finetuned", True):  # llama.cpp's switch of all rotation
        raise keys.refused("rope.scaling.finetuned", "is not false: queries and keys rotate, as in Bamba")
    experts = keys.take("expert_count", 0)
    shared = keys.take("expert_shared_feed_forward_length", REQUIRED if experts else 0)
    return {
        **_mamba(keys, _MAMBA_SIZES),
        "mamba_expand": _expansion(keys, values),
        "layer_types": _attending(keys, values, _LINEAR),
        "position_embedding_type": "nope",
        **_granite_multipliers(keys, values),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.take("expert_used_count", 0),
        "shared_intermediate_size": shared if experts else values["intermediate_size"],
    }


_MAMBA_SIZES = "mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv"  # keys of Granite and Falcon-H1


def _mamba(keys: Metadata, attributes: str) -> Values:
    """Sizes of a Mamba2 layer, named ``attributes``: heads, their width, groups, width of a state, taps of a convolution."""
    inner, heads = keys.take("ssm.inner_size"), keys.take("ssm.time_step_rank")
    if not heads or inner % heads:
        raise keys.refused("ssm.inner_size", f"is no multiple of the {heads} heads")
    others = [keys.take(f"ssm.{name}") for name in ("group_count", "state_size", "conv_kernel")]
    return dict(zip(attributes.split(), [heads, inner // heads, *others], strict=True))


def _expansion(keys: Metadata, values: Values) -> int:
    inner, hidden = keys.take("ssm.inner_size"), values["hidden_size"]
    if inner % hidden:
        raise keys.refused("ssm.inner_size", f"is no multiple of the embedding length {hidden}")
    return inner // hidden


def _attending(keys: Metadata, values: Values, other: str) -> list[str]:
    """The layers' types: those without keys and values are of the type ``other``."""
    return [_FULL if count else other for count in keys.take_each(_KEY_HEADS, values["num_hidden_layers"])]


def _falcon_h1(keys: Metadata, values: Values) -> Values:
    """The converter multiplies the weights by the model's multipliers, which are 1 therefore."""
    return {**_mamba(keys, _MAMBA_SIZES), "mamba_d_ssm": keys.take("ssm.inner_size"), "mamba_norm_before_gate": False}


def _nemotron_h(keys: Metadata, values: Values) -> Values:
    """A layer is a feed-forward block, attention or a recurrence."""
    experts = keys.take("expert_count", 0)
    if keys.take("attention.layer_norm_epsilon", values["layer_norm_epsilon"]) != values["layer_norm_epsilon"]:
        raise keys.refused("attention.layer_norm_epsilon", "is not the epsilon of the RMS norms, and the model has no others")
    widths = keys.take_each(FEED_FORWARD, values["num_hidden_layers"])
    attending = _attending(keys, values, _LINEAR)
    del values["num_hidden_layers"]
    block = "moe" if experts else "mlp"
    return {
        "layers_block_type": [block if width else kind for width, kind in zip(widths, attending, strict=True)],
        **_mamba(keys, "mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel"),
        **(_nemotron_experts(keys) if experts else {}),
    }


def _nemotron_experts(keys: Metadata) -> Values:
    return {
        "n_routed_experts": keys.take("expert_count"),
        "num_experts_per_tok": keys.take("expert_used_count"),
        "moe_intermediate_size": keys.take("expert_feed_forward_length"),
        "n_shared_experts": keys.take("expert_shared_count", 1),
        "moe_shared_expert_intermediate_size": keys.take("expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(keys.take("expert_weights_norm", False)),
        "routed_scaling_factor": _scale(keys, "expert_weights_scale"),
        "moe_latent_size": keys.take("moe_latent_size", None),
    }


def _mamba2(keys: Metadata, values: Values) -> Values:
    """Nothing attends; heads and feed-forward blocks are counted as 0."""
    for key in ("intermediate_size", "num_attention_heads", "max_position_embeddings"):
        values.pop(key)
    return {**_mamba(keys, "num_heads head_dim n_groups state_size conv_kernel"), "expand": _expansion(keys, values)}


def _lfm2(keys: Metadata, values: Values) -> Values:
    """A layer without keys and values is a convolution. The file has the feed-forward blocks' own width."""
    return {"layer_types": _attending(keys, values, "conv"), "block_auto_adjust_ff_dim": False}


def _lfm2_moe(keys: Metadata, values: Values) -> Values:
    if keys.take("expert_gating_func") != _SIGMOID:
        raise keys.refused("expert_gating_func", f"is not the sigmoid ({_SIGMOID}), by which the model chooses its experts")
    _check_weights_sum_to_one(keys)
    return {**_lfm2(keys, values), "num_dense_layers": keys.take("leading_dense_block_count", 0)}


def _check_weights_sum_to_one(keys: Metadata) -> None:
    if not keys.take("expert_weights_norm", True):
        raise keys.refused("expert_weights_norm", "is false, and the chosen experts' weights sum to one")


def _check_softmax(keys: Metadata) -> None:
    if keys.take("expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise keys.refused("expert_gating_func", f"is not softmax ({_SOFTMAX}), by which the model chooses its experts")


def _qwen_next(keys: Metadata, values: Values) -> Values:
    """The gated delta rule in all layers but every fourth, or those that the file names."""
    if abs(values["rms_norm_eps"] - _DELTA_EPSILON) > 1e-9:
        raise keys.refused(RMS_EPSILON, f"is not {_DELTA_EPSILON}, by which the model divides queries and keys")
    inner, heads, every = keys.take("ssm.inner_size"), keys.take("ssm.time_step_rank"), keys.take("full_attention_interval", 4)
    groups = keys.take("ssm.group_count")
    if not heads or not groups or inner % heads or heads % groups:
        raise keys.refused("ssm.inner_size", f"is no multiple of {heads} value heads, or these are none of {groups} key heads")
    default = _all_but_each(every, values["num_hidden_layers"])
    recurrent = keys.take_each("attention.recurrent_layers", len(default), default)
    return {
        "layer_types": [_LINEAR if flag else _FULL for flag in recurrent],
        "linear_num_key_heads": groups,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


def _qwen35(keys: Metadata, values: Values) -> Values:
    """Layers behind the others draft further tokens, and are left out."""
    values["num_hidden_layers"] -= keys.take("nextn_predict_layers", 0)
    sections = keys.take("rope.dimension_sections")
    rotated = int(values["head_dim"] * values["rope_parameters"]["partial_rotary_factor"])
    if len(sections) < 3 or any(pair >= 3 * sections[pair % 3] for pair in range(rotated // 2)):
        raise keys.refused("rope.dimension_sections", f"does not give each of {rotated // 2} pairs a position of the text")
    rotary = {**values["rope_parameters"], "mrope_section": sections[:3]}
    return {**_qwen_next(keys, values), "rope_parameters": rotary}


def _qwen35_moe(keys: Metadata, values: Values) -> Values:
    values.pop("intermediate_size")
    _check_weights_sum_to_one(keys)
    _check_softmax(keys)
    return _qwen35(keys, values)


def _qwen3_next(keys: Metadata, values: Values) -> Values:
    _check_weights_sum_to_one(keys)
    _check_softmax(keys)
    return _qwen_next(keys, values)


def _mistral3(keys: Metadata, values: Values) -> Values:
    """Queries grow with the logarithm of their position: `attention.temperature_scale`."""
    original = keys.take("rope.scaling.original_context_length", values["max_position_embeddings"])
    growth = {"llama_4_scaling_beta": keys.take("attention.temperature_scale", 0.0), "original_max_position_embeddings": original}
    return {"rope_parameters": {**values["rope_parameters"], **growth}}


def _experts(keys: Metadata, values: Values, normalised: bool) -> Values:
    """``normalised``: whether llama.cpp lets the weights of the chosen experts sum to one, whatever the file says."""
    _check_softmax(keys)
    if bool(keys.take("expert_weights_norm", normalised)) != normalised:
        raise keys.refused("expert_weights_norm", f"is not {normalised}, which the architecture is computed with")
    return {"norm_topk_prob": normalised}


def _qwen_experts(keys: Metadata, values: Values, normalised: bool) -> Values:
    found = _experts(keys, values, normalised)
    width = values["intermediate_size"] // values["num_experts_per_tok"]
    return {**found, "moe_intermediate_size": keys.take("expert_feed_forward_length", width)}


def _qwen2moe(keys: Metadata, values: Values) -> Values:
    shared = keys.take("expert_shared_feed_forward_length", values["intermediate_size"])
    return {**_qwen_experts(keys, values, normalised=False), "shared_expert_intermediate_size": shared}


_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_LAYER_NORM = "attention.layer_norm_epsilon"
_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_GATED_BIAS = {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"}
_UNGATED_BIAS = {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"}
_CONVOLUTION_BIAS = "blk.*.ssm_conv1d.bias"
_EXPERTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_WIDE_EXPERTS = {**_EXPERTS, "moe_intermediate_size": "expert_feed_forward_length"}
_DELTA = {"linear_key_head_dim": "ssm.state_size", "linear_conv_kernel_dim": "ssm.conv_kernel"}
_DELTA_EXPERTS = {**_DELTA, **_WIDE_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_SHORT_CONVOLUTION = {"conv_L_cache": "shortconv.l_cache"}
_NEMOTRON_H = Architecture(
    "nemotron_h",
    {"use_conv_bias": _CONVOLUTION_BIAS, "mlp_bias": "blk.*.ffn_up.bias"},
    (RMS_EPSILON, "layer_norm_epsilon"),
    rotates=False,
    mixed=True,
    more=_nemotron_h,
)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _GATED_BIAS),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", keys=_EXPERTS, more=_qwen2moe),
    "qwen3": Architecture("qwen3", _ATTENTION_BIAS),
    "qwen3moe": Architecture("qwen3_moe", _ATTENTION_BIAS, keys=_EXPERTS, more=partial(_qwen_experts, normalised=True)),
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
    "smollm3": Architecture("smollm3", _GATED_BIAS),
    "mistral3": Architecture("ministral3", more=_mistral3),
    "granite": Architecture("granite", _GATED_BIAS, scales=True, more=_granite),
    "gemma": Architecture("gemma"),
    "arcee": Architecture("arcee", _UNGATED_BIAS),
    "olmo2": Architecture("olmo2", _ATTENTION_BIAS, windows=True, more=_olmo2),
    "olmoe": Architecture("olmoe", _ATTENTION_BIAS, keys=_EXPERTS, more=partial(_experts, normalised=False)),
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
        sizes={key: attribute for key, attribute in SIZES.items() if key != FEED_FORWARD},
        heads=False,
        keys={"hidden_size_per_layer_input": "embedding_length_per_layer_input"},
        more=_gemma4,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        windows=True,
        mixed=True,
        keys={
            "intermediate_size": "expert_feed_forward_length",
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
        },
        more=partial(_local_layers, every=2),
    ),
    "gpt2": Architecture("gpt2", epsilon=(_LAYER_NORM, "layer_norm_epsilon"), heads=False, more=_gpt2),
    "starcoder2": Architecture("starcoder2", {"use_bias": "blk.0.attn_q.bias"}, (_LAYER_NORM, "norm_epsilon")),
    "nemotron": Architecture("nemotron", _UNGATED_BIAS, (_LAYER_NORM, "norm_eps"), partial_rotary=True),
    "qwen35": Architecture("qwen3_5_text", partial_rotary=True, keys=_DELTA, more=_qwen35),
    "qwen35moe": Architecture("qwen3_5_moe_text", partial_rotary=True, mixed=True, keys=_DELTA_EXPERTS, more=_qwen35_moe),
    "qwen3next": Architecture("qwen3_next", partial_rotary=True, keys=_DELTA_EXPERTS, more=_qwen3_next),
    "lfm2": Architecture("lfm2", epsilon=(RMS_EPSILON, "norm_eps"), mixed=True, keys=_SHORT_CONVOLUTION, more=_lfm2),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {"use_expert_bias": "blk.*.exp_probs_b.bias"},
        (RMS_EPSILON, "norm_eps"),
        mixed=True,
        keys={**_SHORT_CONVOLUTION, **_WIDE_EXPERTS},
        more=_lfm2_moe,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {"attention_bias": "blk.*.attn_q.bias", "mamba_conv_bias": _CONVOLUTION_BIAS},
        rotates=False,
        scales=True,
        mixed=True,
        more=_granite_hybrid,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        {**_GATED_BIAS, "mamba_conv_bias": _CONVOLUTION_BIAS, "mamba_rms_norm": "blk.0.ssm_norm.weight"},
        more=_falcon_h1,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "mamba2": Architecture(
        "mamba2", {"use_conv_bias": _CONVOLUTION_BIAS}, (RMS_EPSILON, "layer_norm_epsilon"), heads=False, more=_mamba2
    ),
}
