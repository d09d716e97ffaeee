"""How a parameter is made of a file's tensors: which they are, and what llama.cpp's converter did to them, undone.

Converter: conversion/{qwen,lfm2,granite,falcon_h1,nemotron,mamba}.py of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tide_runtime.errors import ModelFilesError
from transformers import PreTrainedConfig

Make = Callable[..., NDArray[Any]]
FORMED = (
    "gpt-oss", "qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "granitehybrid", "falcon-h1", "nemotron_h",
    "nemotron_h_moe", "mamba2",
)  # fmt: skip


def _as_it_is(values: NDArray) -> NDArray:
    return values


@dataclass(frozen=True)
class Form:
    """A parameter's values.

    Args:
        tensors: names of the tensors that it is made of.
        make: their arrays, one after the other → the parameter. It only moves whole rows where all of them are matrices, so
            that it can be asked which row of a tensor is which of the parameter.
        columns: which column of the result is each of the parameter's; None: they are in order.
    """

    tensors: tuple[str, ...]
    make: Make = _as_it_is
    columns: NDArray[np.int64] | None = None

    def value(self, *arrays: NDArray) -> NDArray:
        made = self.make(*arrays)
        return made if self.columns is None else made[:, self.columns]


def tensor_forms(
    architecture: str, config: PreTrainedConfig, parameters: Collection[str], stored: Collection[str]
) -> dict[str, Form]:
    """The form of each parameter that has one.

    ``parameters``: transformers' names of parameters and persistent buffers. ``stored``: names of the file's tensors, as releases
    of the converter differ in what they join.
    """
    found: dict[str, Form] = {}
    for name in parameters:
        layer, inner = match.groups() if (match := _LAYER.match(name)) else ("", name)
        if (tensors := _tensors(architecture, config, inner)) is not None:
            prefix = f"blk.{layer}." if layer else ""
            joined = _JOINED.get(tensors)
            chosen = (joined,) if joined is not None and f"{prefix}{joined}" in stored else tensors
            make, columns = _undone(architecture, config, chosen)
            found[name] = Form(tuple(f"{prefix}{tensor}" for tensor in chosen), make, columns)
    return found


_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.+)")
# What is inside a layer or outside of all of them: transformers' names, and the file's without suffix.
_MODULES = {
    "model.embed_tokens model.embeddings backbone.embeddings": "token_embd",
    "model.norm model.final_layernorm model.norm_f backbone.norm_f": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "input_layernorm operator_norm norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj mixer.q_proj": "attn_q",
    "self_attn.k_proj mixer.k_proj": "attn_k",
    "self_attn.v_proj mixer.v_proj": "attn_v",
    "self_attn.o_proj self_attn.out_proj mixer.o_proj": "attn_output",
    "self_attn.q_norm self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_norm self_attn.k_layernorm": "attn_k_norm",
    "mlp.gate_proj feed_forward.gate_proj feed_forward.w1": "ffn_gate",
    "mlp.up_proj feed_forward.up_proj feed_forward.w3 mixer.up_proj": "ffn_up",
    "mlp.down_proj feed_forward.down_proj feed_forward.w2 mixer.down_proj": "ffn_down",
    "mamba.in_proj mixer.in_proj": "ssm_in",
    "mamba.conv1d mixer.conv1d linear_attn.conv1d": "ssm_conv1d",
    "mamba.norm mixer.norm linear_attn.norm": "ssm_norm",
    "mamba.out_proj mixer.out_proj linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "mlp.gate mlp.router feed_forward.gate mixer.gate block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
_TENSOR = {module: tensor for modules, tensor in _MODULES.items() for module in modules.split()}
_EXPERTS = ["mlp.experts", "feed_forward.experts", "block_sparse_moe.experts", "mixer.experts"]
_WHOLE: Mapping[str, tuple[str, ...]] = {
    **{f"{place}.dt_bias": ("ssm_dt.bias",) for place in ("mamba", "mixer", "linear_attn")},
    **{f"{place}.A_log": ("ssm_a",) for place in ("mamba", "mixer", "linear_attn")},
    **{f"{place}.D": ("ssm_d",) for place in ("mamba", "mixer")},
    **{f"{place}.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight") for place in _EXPERTS},
    **{f"{place}.up_proj": ("ffn_up_exps.weight",) for place in _EXPERTS},
    **{f"{place}.down_proj": ("ffn_down_exps.weight",) for place in _EXPERTS},
    "linear_attn.in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight"),
    "feed_forward.expert_bias": ("exp_probs_b.bias",),
    "mixer.gate.e_score_correction_bias": ("exp_probs_b.bias",),
    "pre_ff_layernorm.weight": ("ffn_norm",),
    "self_attn.sinks": ("attn_sinks.weight",),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
}
_JOINED = {
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"): "ffn_gate_up_exps.weight",
    ("attn_qkv.weight", "attn_gate.weight"): "ssm_in.weight",
}


def _tensors(architecture: str, config: PreTrainedConfig, name: str) -> tuple[str, ...] | None:
    if name in _WHOLE:
        return _WHOLE[name]
    module, _, suffix = name.rpartition(".")
    if architecture == "granitehybrid" and module.startswith("shared_mlp."):
        end = "_shexp" if config.num_local_experts else ""
        parts = ("gate", "up") if module.endswith("input_linear") else ("down",)
        return tuple(f"ffn_{part}{end}.{suffix}" for part in parts)
    if module == "post_attention_layernorm":
        return (f"{'ffn_norm' if architecture == 'granitehybrid' else 'post_attention_norm'}.{suffix}",)
    return (f"{_TENSOR[module]}.{suffix}",) if module in _TENSOR else None


def _undone(architecture: str, config: PreTrainedConfig, tensors: tuple[str, ...]) -> tuple[Make, NDArray[np.int64] | None]:
    """`Form.make` and `Form.columns` of the parameter that is made of ``tensors``, named without their layer."""
    tensor = tensors[0]
    if architecture == "gpt-oss" and "_exps." in tensor:
        make: Make = _transposed if tensor.endswith("weight") else _side_by_side
    elif tensor in _SHAPED:
        make = _SHAPED[tensor]
    elif tensors == ("attn_qkv.weight", "attn_gate.weight"):
        make = partial(_by_key_head, config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim)
    elif len(tensors) > 1:
        make = _above_each_other
    elif architecture.startswith("qwen3") and tensor.endswith("norm.weight"):
        make = _less_one
    elif architecture in _NEIGHBOURS and tensor.startswith(("attn_q.", "attn_k.")):
        make = partial(_halves, config.num_attention_heads if tensor.startswith("attn_q.") else config.num_key_value_heads)
    else:
        make = _as_it_is
    return _grouped_values(config, tensor, make) if architecture in _TILED else (make, None)


_NEIGHBOURS = ("granitehybrid", "nemotron_h", "nemotron_h_moe")  # the converter puts rows that rotate together side by side
_TILED = ("qwen35", "qwen35moe")


def _flat(values: NDArray) -> NDArray:
    return values.reshape(-1)


def _less_one(values: NDArray) -> NDArray:
    return values - 1


def _log_decay(values: NDArray) -> NDArray:
    """-exp(A_log), of one or two dimensions → A_log. Raises ModelFilesError for numbers that it cannot be."""
    if not (values < 0).all():
        raise ModelFilesError("a tensor ssm_a has numbers that are not below zero: the file was changed; download it again")
    return np.log(-values).reshape(-1)


def _taps(values: NDArray) -> NDArray:
    """A convolution's weights [C, W] → [C, 1, W]."""
    return values[:, None]


def _row(values: NDArray) -> NDArray:
    return values[None]


_SHAPED: Mapping[str, Make] = {
    "ssm_a": _log_decay,
    "ssm_d": _flat,
    "ssm_norm.weight": _flat,
    "ssm_conv1d.weight": _taps,
    "shortconv.conv.weight": _taps,
    "ffn_gate_inp_shexp.weight": _row,
}


def _above_each_other(*parts: NDArray) -> NDArray:
    """[N, K], or of several experts [E, N, K], joined along N."""
    return np.concatenate(parts, -2)


def _side_by_side(*parts: NDArray) -> NDArray:
    """[E, N] of several experts, or [E, N, K], with the rows of ``parts`` in turn."""
    first = parts[0]
    return np.stack(parts, 2).reshape(len(first), -1, *first.shape[2:])


def _transposed(*parts: NDArray) -> NDArray:
    """`_side_by_side` of [E, N, K] → [E, K, N]."""
    return _side_by_side(*parts).swapaxes(1, 2)


def _halves(heads: int, values: NDArray) -> NDArray:
    """Rows that rotate together, side by side in each head → the halves of the head."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _by_key_head(heads: int, keys: int, joined: NDArray, gate: NDArray) -> NDArray:
    """Rows [query | key | value] of all heads, ``keys`` of query and of key, and the gate's → those of each key head together."""
    parts = [*np.split(joined, [keys, 2 * keys]), gate]
    return np.concatenate([part.reshape(heads, -1, *part.shape[1:]) for part in parts], 1).reshape(-1, *joined.shape[1:])


def _grouped_values(config: PreTrainedConfig, tensor: str, make: Make) -> tuple[Make, NDArray[np.int64] | None]:
    """``make`` after the value heads, of which the file has the first of each key head before the second, were put together.

    llama.cpp repeats keys as [k0, k1, …, k0, k1, …], transformers as [k0, k0, …, k1, k1, …].
    """
    keys = config.linear_num_key_heads
    heads = config.linear_num_value_heads
    width = config.linear_value_head_dim
    if keys == heads:
        return make, None
    if tensor == "ssm_out.weight":
        return make, _grouped(keys, heads, 0, np.arange(heads * width))
    if tensor in ("attn_qkv.weight", "ssm_conv1d.weight"):
        first = 2 * keys * config.linear_key_head_dim
    elif tensor in ("attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight", "ssm_dt.bias", "ssm_a"):
        first = 0
    else:
        return make, None
    return lambda values: make(_grouped(keys, heads, first, values)), None


def _grouped(keys: int, heads: int, first: int, values: NDArray) -> NDArray:
    """The rows of ``heads`` value heads, which follow the ``first`` rows, by key head."""
    own = values[first:]
    moved = own.reshape(heads // keys, keys, -1, *own.shape[1:]).swapaxes(0, 1).reshape(own.shape)
    return np.concatenate([values[:first], moved])
