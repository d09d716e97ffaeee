"""What the keys of a recurrent model's GGUF file say beside those that every model has.

Keys: `load_arch_hparams` in src/models/{qwen35,qwen3next,lfm2,granite-hybrid,falcon-h1,nemotron-h,mamba2}.cpp of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tide_export.sources.gguf.gguf_metadata import Metadata

Values = dict[str, Any]
_SIGMOID = 2  # expert_gating_func
_DELTA_EPSILON = 1e-6  # of the lengths of queries and keys: transformers has this number, llama.cpp that of the other norms
_LINEAR, _FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class _Scan:
    """Sizes of a Mamba2 layer."""

    heads: int
    width: int
    groups: int
    state: int
    taps: int

    @property
    def inner(self) -> int:
        return self.heads * self.width


def _scan(keys: Metadata) -> _Scan:
    inner, heads = keys.take("ssm.inner_size"), keys.take("ssm.time_step_rank")
    if not heads or inner % heads:
        raise keys.refused("ssm.inner_size", f"is no multiple of the {heads} heads")
    return _Scan(heads, inner // heads, keys.take("ssm.group_count"), keys.take("ssm.state_size"), keys.take("ssm.conv_kernel"))


def _expansion(keys: Metadata, scan: _Scan, hidden: int) -> int:
    if scan.inner % hidden:
        raise keys.refused("ssm.inner_size", f"is no multiple of the embedding length {hidden}")
    return scan.inner // hidden


def _mamba(keys: Metadata, scan: _Scan) -> Values:
    """As Granite and Falcon-H1 call them."""
    return {
        "mamba_n_heads": scan.heads,
        "mamba_d_head": scan.width,
        "mamba_n_groups": scan.groups,
        "mamba_d_state": scan.state,
        "mamba_d_conv": scan.taps,
    }


def granite_multipliers(keys: Metadata, values: Values) -> Values:
    return {
        "attention_multiplier": keys.take("attention.scale", 0) or values["head_dim"] ** -0.5,
        "embedding_multiplier": keys.take("embedding_scale", 0) or 1.0,
        "residual_multiplier": keys.take("residual_scale", 0) or 1.0,
        "logits_scaling": keys.take("logit_scale", 0) or 1.0,
    }


def granite_hybrid(keys: Metadata, values: Values) -> Values:
    """A layer without keys and values is recurrent."""
    if keys.take("rope.scaling.finetuned", True):  # llama.cpp's switch of all rotation
        raise keys.refused("rope.scaling.finetuned", "is not false: queries and keys rotate, as in Bamba")
    scan = _scan(keys)
    layers = values["num_hidden_layers"]
    experts = keys.take("expert_count", 0)
    shared = keys.take("expert_shared_feed_forward_length", *(() if experts else (0,)))
    return {
        **_mamba(keys, scan),
        "mamba_expand": _expansion(keys, scan, values["hidden_size"]),
        "layer_types": [_FULL if count else _LINEAR for count in keys.take_each("attention.head_count_kv", layers)],
        "position_embedding_type": "nope",
        **granite_multipliers(keys, values),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.take("expert_used_count", 0),
        "shared_intermediate_size": shared if experts else values["intermediate_size"],
    }


def falcon_h1(keys: Metadata, values: Values) -> Values:
    """The converter multiplies the weights by the model's multipliers, which are 1 therefore."""
    scan = _scan(keys)
    return {**_mamba(keys, scan), "mamba_d_ssm": scan.inner, "mamba_norm_before_gate": False}


def nemotron_h(keys: Metadata, values: Values) -> Values:
    """A layer is a feed-forward block, attention or a recurrence."""
    scan = _scan(keys)
    layers = values.pop("num_hidden_layers")
    experts = keys.take("expert_count", 0)
    if keys.take("attention.layer_norm_epsilon", values["layer_norm_epsilon"]) != values["layer_norm_epsilon"]:
        raise keys.refused("attention.layer_norm_epsilon", "is not the epsilon of the RMS norms, and the model has no others")
    widths, heads = (keys.take_each(key, layers) for key in ("feed_forward_length", "attention.head_count_kv"))
    block = "moe" if experts else "mlp"
    return {
        "layers_block_type": [block if w else _FULL if h else _LINEAR for w, h in zip(widths, heads, strict=True)],
        "mamba_num_heads": scan.heads,
        "mamba_head_dim": scan.width,
        "n_groups": scan.groups,
        "ssm_state_size": scan.state,
        "conv_kernel": scan.taps,
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
        "routed_scaling_factor": keys.take("expert_weights_scale", 0) or 1.0,
        "moe_latent_size": keys.take("moe_latent_size", None),
    }


def mamba2(keys: Metadata, values: Values) -> Values:
    """Nothing attends; heads and feed-forward blocks are counted as 0."""
    scan = _scan(keys)
    for key in ("intermediate_size", "num_attention_heads", "max_position_embeddings"):
        values.pop(key)
    return {
        "num_heads": scan.heads,
        "head_dim": scan.width,
        "n_groups": scan.groups,
        "state_size": scan.state,
        "conv_kernel": scan.taps,
        "expand": _expansion(keys, scan, values["hidden_size"]),
    }


def lfm2(keys: Metadata, values: Values) -> Values:
    """A layer without keys and values is a convolution. The file has the feed-forward blocks' own width."""
    counts = keys.take_each("attention.head_count_kv", values["num_hidden_layers"])
    return {
        "layer_types": [_FULL if count else "conv" for count in counts],
        "conv_L_cache": keys.take("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(keys: Metadata, values: Values) -> Values:
    if keys.take("expert_gating_func") != _SIGMOID:
        raise keys.refused("expert_gating_func", f"is not the sigmoid ({_SIGMOID}), by which the model chooses its experts")
    if not keys.take("expert_weights_norm", True):
        raise keys.refused("expert_weights_norm", "is false, and the chosen experts' weights sum to one")
    return {
        **lfm2(keys, values),
        "num_dense_layers": keys.take("leading_dense_block_count", 0),
        "num_experts": keys.take("expert_count"),
        "num_experts_per_tok": keys.take("expert_used_count"),
        "moe_intermediate_size": keys.take("expert_feed_forward_length"),
    }


def qwen_next(keys: Metadata, values: Values) -> Values:
    """The gated delta rule in all layers but every fourth, or those that the file names."""
    if abs(values["rms_norm_eps"] - _DELTA_EPSILON) > 1e-9:
        raise keys.refused(
            "attention.layer_norm_rms_epsilon", f"is not {_DELTA_EPSILON}, by which the model divides queries and keys"
        )
    inner, heads, every = keys.take("ssm.inner_size"), keys.take("ssm.time_step_rank"), keys.take("full_attention_interval", 4)
    groups = keys.take("ssm.group_count")
    if not heads or not groups or inner % heads or heads % groups:
        raise keys.refused("ssm.inner_size", f"is no multiple of {heads} value heads, or these are none of {groups} key heads")
    default = [(layer + 1) % every != 0 for layer in range(values["num_hidden_layers"])]
    recurrent = keys.take_each("attention.recurrent_layers", len(default), default)
    return {
        "layer_types": [_LINEAR if flag else _FULL for flag in recurrent],
        "linear_num_key_heads": groups,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.take("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.take("ssm.conv_kernel"),
    }


def qwen_next_experts(keys: Metadata, values: Values) -> Values:
    if not keys.take("expert_weights_norm", True):
        raise keys.refused("expert_weights_norm", "is false, and the chosen experts' weights sum to one")
    if keys.take("expert_gating_func", 1) != 1:
        raise keys.refused("expert_gating_func", "is not softmax (1), by which the model chooses its experts")
    return {
        "num_experts": keys.take("expert_count"),
        "num_experts_per_tok": keys.take("expert_used_count"),
        "moe_intermediate_size": keys.take("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.take("expert_shared_feed_forward_length"),
    }


def qwen35(keys: Metadata, values: Values) -> Values:
    """Layers behind the others draft further tokens, and are left out."""
    values["num_hidden_layers"] -= keys.take("nextn_predict_layers", 0)
    sections = keys.take("rope.dimension_sections")
    rotated = int(values["head_dim"] * values["rope_parameters"]["partial_rotary_factor"])
    if len(sections) < 3 or any(pair >= 3 * sections[pair % 3] for pair in range(rotated // 2)):
        raise keys.refused("rope.dimension_sections", f"does not give each of {rotated // 2} pairs a position of the text")
    rotary = {**values["rope_parameters"], "mrope_section": sections[:3]}
    return {**qwen_next(keys, values), "rope_parameters": rotary}


def qwen35_moe(keys: Metadata, values: Values) -> Values:
    values.pop("intermediate_size")
    return {**qwen35(keys, values), **qwen_next_experts(keys, values)}


def qwen3_next(keys: Metadata, values: Values) -> Values:
    return {**qwen_next(keys, values), **qwen_next_experts(keys, values)}
