"""Tiny random recurrent models as GGUF files: keys and tensors as llama.cpp's converter writes them.

Names are those of the package gguf, and every change is the converter's own direction, so nothing is shared with the reader.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np
import torch
from export.sources.gguf.tiny_gguf import CONTEXT, VOCAB, GgufFile
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Array = NDArray[np.float32]
LINEAR, FULL = "linear_attention", "full_attention"
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=CONTEXT, initializer_range=0.25, tie_word_embeddings=False,
)  # fmt: skip
_DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4,
    head_dim=32, layer_types=[LINEAR, LINEAR, LINEAR, FULL], rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
)  # fmt: skip
_MAMBA = dict(
    mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=32, mamba_d_head=16, mamba_d_conv=4, mamba_chunk_size=8, rms_norm_eps=1e-3
)
_NEMOTRON = {key: value for key, value in _SIZES.items() if key != "num_hidden_layers"} | dict(
    head_dim=16, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=32, conv_kernel=4, chunk_size=8,
    layer_norm_epsilon=1e-3, time_step_min=1e-30,
)  # fmt: skip
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 64}
_GRANITE = {
    **_SIZES, **_MAMBA, "mamba_expand": 2, "shared_intermediate_size": 96, "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    "residual_multiplier": 0.22, "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "logits_scaling": 3.0,
    "position_embedding_type": "nope",
}  # fmt: skip

# Name → architecture, model type, config.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen35": ("qwen35", "qwen3_5_text", {**_SIZES, **_DELTA}),
    "qwen35 with as many key heads": ("qwen35", "qwen3_5_text", {**_SIZES, **_DELTA, "linear_num_key_heads": 6}),
    "qwen35moe": ("qwen35moe", "qwen3_5_moe_text", {**_SIZES, **_DELTA, **_SHARED, "initializer_range": 0.15}),
    "qwen3next": ("qwen3next", "qwen3_next", {**_SIZES, **_DELTA, **_SHARED, "initializer_range": 0.15}),
    "lfm2": (
        "lfm2",
        "lfm2",
        {
            **_SIZES,
            "layer_types": ["conv", "conv", FULL, "conv"],
            "block_multiple_of": 32,
            "tie_word_embeddings": True,
            "norm_eps": 1e-3,
        },
    ),
    "lfm2moe": (
        "lfm2moe",
        "lfm2_moe",
        {
            **_SIZES, **_EXPERTS, "layer_types": ["conv", "conv", FULL, "conv"], "num_dense_layers": 1, "norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
    ),
    "granitehybrid": ("granitehybrid", "granitemoehybrid", {**_GRANITE, "num_local_experts": 0, "tie_word_embeddings": True}),
    "granitehybrid with experts": (
        "granitehybrid",
        "granitemoehybrid",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "falcon-h1": (
        "falcon-h1",
        "falcon_h1",
        {
            **_SIZES, **_MAMBA, "head_dim": 32, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
            "ssm_multipliers": [0.5, 2.0, 1.5, 0.7, 1.2], "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8, 
            "key_multiplier": 0.6, "attention_in_multiplier": 1.4, "attention_out_multiplier": 0.9, "mlp_multipliers": [0.7, 1.6],
            "embedding_multiplier": 2.5, "lm_head_multiplier": 0.4,
        },
    ),
    "falcon-h1 without norm": (
        "falcon-h1", "falcon_h1", {**_SIZES, **_MAMBA, "head_dim": 16, "mamba_d_ssm": 128, "mamba_rms_norm": False},
    ),
    "nemotron_h": ("nemotron_h", "nemotron_h", {**_NEMOTRON, "layers_block_type": [LINEAR, "mlp", FULL, LINEAR]}),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        "nemotron_h",
        {
            **_NEMOTRON, "layers_block_type": [LINEAR, "moe", FULL, LINEAR, "moe"], "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
            "routed_scaling_factor": 1.7,
        },
    ),
    "mamba2": (
        "mamba2", "mamba2",
        dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_heads=8, head_dim=16, state_size=32, n_groups=2,
             chunk_size=8, layer_norm_epsilon=1e-3, initializer_range=0.25, tie_word_embeddings=False),
    ),
}  # fmt: skip


def tiny_recurrent(name: str, config: Mapping[str, Any] | None = None, **keys: Any) -> GgufFile:
    """A random model of `MODELS`; ``config`` over the table's, ``keys`` (without the architecture) over the file's."""
    architecture, model_type, settings = MODELS[name]
    torch.manual_seed(0)
    made = AutoConfig.for_model(model_type, **{**settings, **(config or {})})
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *(b for n, b in model.named_buffers() if n in model.state_dict())):
            if parameter.ndim == 1:  # norms of ones and biases of zeros would hide what is missing
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.ndim == 3 and parameter.shape[1] == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    prefixed = {f"{architecture}.{key}": value for key, value in {**_keys(architecture, made), **keys}.items()}
    general = {"general.architecture": architecture, **prefixed, "tokenizer.ggml.eos_token_id": VOCAB - 1}
    return GgufFile(model, general, dict(_tensors(architecture, model)))


def _keys(architecture: str, config: Any) -> dict[str, Any]:
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [FULL] * layers
    epsilons = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    counted = {"lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe"}
    heads = [config.num_key_value_heads if kind == FULL else 0 for kind in kinds] if architecture != "mamba2" else 0
    found = {
        "context_length": CONTEXT,
        "embedding_length": config.hidden_size,
        "block_count": layers,
        "feed_forward_length": getattr(config, "intermediate_size", 0),
        "attention.head_count": getattr(config, "num_attention_heads", 0),
        "attention.layer_norm_rms_epsilon": next(getattr(config, name) for name in epsilons if hasattr(config, name)),
        "vocab_size": config.vocab_size,
    }
    if architecture != "mamba2":
        found["attention.head_count_kv"] = heads if architecture in counted else config.num_key_value_heads
        found["rope.dimension_count"] = head_dim
    if architecture not in ("mamba2", "granitehybrid"):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if (rotary := getattr(config, "rope_parameters", None)) and architecture != "granitehybrid":
        found["rope.freq_base"] = rotary["rope_theta"]
    return {**found, **_own_keys(architecture, config, kinds, head_dim)}


def _own_keys(architecture: str, config: Any, kinds: list[str], head_dim: int) -> Mapping[str, Any]:
    if architecture.startswith("qwen3"):
        moe = {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 64,
        }
        return {
            "ssm.conv_kernel": 4,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "full_attention_interval": 4,
            "rope.dimension_count": head_dim // 4,
            **({"rope.dimension_sections": [2, 1, 1, 0]} if architecture != "qwen3next" else {}),
            **(moe if architecture != "qwen35" else {}),
        }
    if architecture.startswith("lfm2"):
        width = 32 * -(-int(2 * config.intermediate_size / 3) // 32) if architecture == "lfm2" else config.intermediate_size
        moe = {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        }  # fmt: skip
        return {"shortconv.l_cache": 3, "feed_forward_length": width, **(moe if architecture == "lfm2moe" else {})}
    scan: dict[str, Any] = {
        "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 8, "ssm.inner_size": 128
    }  # fmt: skip
    if architecture == "granitehybrid":
        experts = config.num_local_experts
        scan |= {
            "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
            "rope.scaling.finetuned": False,
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
            **({"expert_count": experts, "expert_used_count": 2} if experts else {}),
        }
    if architecture.startswith("nemotron_h"):
        width = config.intermediate_size if architecture == "nemotron_h" else config.moe_intermediate_size
        scan["feed_forward_length"] = [width if kind in ("mlp", "moe") else 0 for kind in kinds]
        scan["attention.layer_norm_epsilon"] = config.layer_norm_epsilon
    if architecture == "nemotron_h_moe":
        scan |= {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64,
            "expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.7, "expert_group_count": 1,
        }  # fmt: skip
    return scan


def _tensors(architecture: str, model: PreTrainedModel) -> Iterator[tuple[str, Array]]:
    """The state dict under GGUF's names, with the converter's changes."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for own, values in _converted(architecture, model.config, name, tensor.numpy().astype(np.float32)):
            found = table.get_name(own, try_suffixes=(".weight", ".bias"))
            if found is None:  # what the converter names by the kind of tensor, not by its HuggingFace name
                found = own
            yield found, np.ascontiguousarray(values)


def _converted(architecture: str, config: Any, name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """HuggingFace names as the checkpoints have them, or GGUF names."""
    if architecture.startswith(("nemotron_h", "mamba2")):
        name = name.replace("model.", "backbone.", 1)
    _, _, layer, inner = name.split(".", 3) if ".layers." in name else ("", "", "", name)
    if inner.endswith("gate_up_proj") or inner == "shared_mlp.input_linear.weight":
        dense = inner.startswith("shared_mlp") and not config.num_local_experts
        end = "" if dense else "_shexp" if inner.startswith("shared_mlp") else "_exps"
        for part, half in zip(("gate", "up"), np.split(values, 2, -2), strict=True):
            yield f"blk.{layer}.ffn_{part}{end}.weight", half
        return
    if inner == "shared_mlp.output_linear.weight":
        yield f"blk.{layer}.ffn_down{'_shexp' if config.num_local_experts else ''}.weight", values
        return
    if inner.endswith(("experts.down_proj", "experts.up_proj")):
        yield f"blk.{layer}.ffn_{'down' if 'down' in inner else 'up'}_exps.weight", values
        return
    if inner.endswith(("expert_bias", "e_score_correction_bias")):
        yield f"blk.{layer}.exp_probs_b.bias", values
        return
    if inner == "block_sparse_moe.router.weight":
        yield f"blk.{layer}.ffn_gate_inp.weight", values
        return
    if inner.endswith("in_proj_qkvz.weight"):
        yield from _split_qkvz(config, layer, values)
        return
    if architecture in ("qwen35", "qwen35moe") and ".linear_attn." in name:
        values = _tiled(config, inner, values)
    if inner.endswith("A_log"):
        values = -np.exp(values)
    if inner.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    if inner.endswith(("conv1d.weight", "conv.conv.weight")):
        values = values.squeeze(1)
    if inner.endswith("shared_expert_gate.weight"):
        values = values[0]
    if inner.startswith(("mamba.", "mixer.")):
        if inner.endswith((".A_log", ".D")):
            values = values.reshape(-1, 1)
        if inner.endswith(".norm.weight"):
            values = values.reshape(2, -1)
    if architecture.startswith("qwen3") and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    if architecture.startswith(("granite", "nemotron")) and inner.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in inner else config.num_key_value_heads
        values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    yield name, _multiplied(config, inner, values) if architecture == "falcon-h1" else values


def _split_qkvz(config: Any, layer: str, values: Array) -> Iterator[tuple[str, Array]]:
    keys, width = config.linear_num_key_heads, config.linear_key_head_dim
    each = config.linear_num_value_heads // keys * config.linear_value_head_dim
    parts = np.split(values.reshape(keys, -1, values.shape[1]), np.cumsum([width, width, each]), 1)
    query, key, value, gate = (part.reshape(-1, values.shape[1]) for part in parts)
    yield f"blk.{layer}.attn_qkv.weight", np.concatenate([query, key, value])
    yield f"blk.{layer}.attn_gate.weight", gate


def _tiled(config: Any, inner: str, values: Array) -> Array:
    """Value heads in the order of ggml's repetition of keys."""
    keys, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    first = 2 * keys * config.linear_key_head_dim if inner.endswith(("in_proj_qkv.weight", "conv1d.weight")) else 0
    if inner.endswith("linear_attn.norm.weight"):
        return values
    if inner.endswith("out_proj.weight"):
        return values.reshape(len(values), keys, each, -1).swapaxes(1, 2).reshape(values.shape)
    moved = values[first:].reshape(keys, each, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values[first:].shape)
    return np.concatenate([values[:first], moved])


def _multiplied(config: Any, inner: str, values: Array) -> Array:
    inside = {
        "feed_forward.down_proj.weight": config.mlp_multipliers[1],
        "feed_forward.gate_proj.weight": config.mlp_multipliers[0],
        "self_attn.k_proj.weight": config.key_multiplier * config.attention_in_multiplier,
        "self_attn.q_proj.weight": config.attention_in_multiplier,
        "self_attn.v_proj.weight": config.attention_in_multiplier,
        "self_attn.o_proj.weight": config.attention_out_multiplier,
        "mamba.out_proj.weight": config.ssm_out_multiplier,
        "model.embed_tokens.weight": config.embedding_multiplier,
        "lm_head.weight": config.lm_head_multiplier,
    }  # fmt: skip
    if inner == "mamba.in_proj.weight":
        states = config.mamba_n_groups * config.mamba_d_state
        sizes = [config.mamba_d_ssm, config.mamba_d_ssm, states, states, config.mamba_n_heads]
        return values * config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, sizes).astype(np.float32)[:, None]
    return values * np.float32(inside.get(inner, 1.0))
