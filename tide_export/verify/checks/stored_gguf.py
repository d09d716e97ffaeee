"""Which numbers of a GGUF file a parameter is, by another path than the loader's.

The loader takes names, orders of rows and offsets of norms from transformers or tables of its own, and blocks from this package.
Here the names are the converter's, its changes (conversion/*.py of https://github.com/ggml-org/llama.cpp) are written down once
more in its own direction, and the package gguf decodes the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from tide_export.sources.gguf.file import GgufTensor, read_file
from tide_export.verify.checks.stored_values import Rows, StoredTensor

Numbers = NDArray[np.float32]


@dataclass(frozen=True)
class _GgufRows:
    """A tensor of a GGUF file, and what the converter did to the parameter.

    Args:
        order: the tensor's row for each row of the parameter.
        columns: the same of columns.
        shift: what was added.
        transposed: whether the parameter's rows are the tensor's columns.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    order: Rows | None = None
    columns: Rows | None = None
    shift: float = 0.0
    transposed: bool = False

    @property
    def name(self) -> str:
        return self.tensor.name

    def rows(self, rows: Rows) -> Numbers:
        wanted = rows if self.order is None else self.order[rows]
        if self.transposed:
            values = _dequantized(self.tensor, self.tensor.data).T[wanted]
        elif len(self.shape) == 1:
            values = _dequantized(self.tensor, self.tensor.data.reshape(-1))[wanted]
        else:
            values = _dequantized(self.tensor, np.ascontiguousarray(self.tensor.data.reshape(self.shape[0], -1)[wanted]))
        values = values if self.columns is None else values[:, self.columns]
        return np.asarray(values, np.float32).reshape(len(rows), *self.shape[1:]) - np.float32(self.shift)


@dataclass(frozen=True)
class _Computed:
    """What ``make`` computes of tensors. ``each``: every row of it from that row of each, as the matrices of experts are."""

    tensors: tuple[GgufTensor, ...]
    shape: tuple[int, ...]
    make: Callable[..., Numbers]
    each: bool = False

    @property
    def name(self) -> str:
        return " and ".join(tensor.name for tensor in self.tensors)

    def rows(self, rows: Rows) -> Numbers:
        data = [tensor.data[rows] if self.each else tensor.data for tensor in self.tensors]
        made = self.make(*(_dequantized(tensor, part) for tensor, part in zip(self.tensors, data, strict=True)))
        return np.asarray(made if self.each else made.reshape(self.shape)[rows], np.float32)


def _dequantized(tensor: GgufTensor, data: NDArray[Any]) -> Numbers:
    import gguf

    return gguf.dequantize(data, gguf.GGMLQuantizationType[tensor.kind])


def gguf_tensors(path: Path, model: PreTrainedModel) -> dict[str, StoredTensor]:
    """Parameter name → what the file has of it."""
    import gguf

    keys, tensors = read_file(path)
    kinds = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    config = model.config.get_text_config()
    table = gguf.get_tensor_name_map(kinds[keys.architecture], config.num_hidden_layers)
    found: dict[str, StoredTensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = tuple(parameter.shape)
        _, _, layer, inner = name.split(".", 3) if ".layers." in name else ("", "", "", name)
        made = _made(keys.architecture, config, inner)
        if made is not None and all(f"blk.{layer}.{tensor}" in tensors for tensor in made[0]):
            parts = tuple(tensors[f"blk.{layer}.{tensor}"] for tensor in made[0])
            found[name] = _Computed(parts, shape, *made[1:])
            continue
        own = name.replace(".dt_bias", ".dt_proj.bias")
        names = (f"blk.{layer}.{_UNNAMED.get(inner)}", *(table.get_name(n, (".weight", ".bias")) for n in (own, _trunk(own))))
        stored = next((stored for stored in names if stored in tensors), None)
        if stored is not None:
            found[name] = _as_parameter(keys.architecture, tensors[stored], shape, config)
    return found


def _trunk(name: str) -> str:
    """The parameter's ``name`` in checkpoints of Nemotron-H."""
    return name.replace("model.", "backbone.", 1)


# What has no name in gguf's table, within a layer. Dense blocks of Granite and its experts' shared ones have different names.
_UNNAMED = {
    "self_attn.sinks": "attn_sinks.weight",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "linear_attn.in_proj_qkvz.weight": "ssm_in.weight",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    **{f"{block}experts.{part}_proj": f"ffn_{part}_exps.weight" for part in ("up", "down")
       for block in ("", "mlp.", "mixer.", "feed_forward.", "block_sparse_moe.")},
}  # fmt: skip
_NEIGHBOURS = ("llama", "mistral3", "smollm3", "granite", "arcee", "granitehybrid", "nemotron_h", "nemotron_h_moe")

_SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")


def _made(architecture: str, config: PreTrainedConfig, inner: str) -> tuple[tuple[str, ...], Callable[..., Numbers], bool] | None:
    """Tensors within a layer, what computes the parameter of them, and `_Computed.each`."""
    module, _, kind = inner.rpartition(".")
    alternating = architecture == "gpt-oss"
    if kind == "gate_up_proj":
        return ("ffn_gate_exps.weight", "ffn_up_exps.weight"), _alternating if alternating else _side_by_side, True
    if kind == "gate_up_proj_bias":
        return ("ffn_gate_exps.bias", "ffn_up_exps.bias"), _alternating, True
    if kind == "down_proj" and alternating:
        return ("ffn_down_exps.weight",), _alternating, True
    if module.startswith("shared_mlp."):
        end = "_shexp.weight" if config.num_local_experts else ".weight"
        parts = ("ffn_gate", "ffn_up") if module.endswith("input_linear") else ("ffn_down",)
        return tuple(f"{part}{end}" for part in parts), lambda *halves: np.concatenate(halves), False
    if module.endswith("in_proj_qkvz"):
        return ("attn_qkv.weight", "attn_gate.weight"), partial(_by_key_head, config), False
    if kind == "A_log":
        order = _tiled(config, config.linear_num_value_heads) if architecture.startswith("qwen35") else slice(None)
        return ("ssm_a",), lambda decay: np.log(-decay).reshape(-1)[order], False
    return None


def _side_by_side(*halves: Numbers) -> Numbers:
    return np.concatenate(halves, 1)


def _alternating(*halves: Numbers) -> Numbers:
    """gpt-oss: an expert's matrix has its inputs first, and gate and up in turn."""
    turned = [half.swapaxes(1, -1) for half in halves]
    return np.stack(turned, -1).reshape(*turned[0].shape[:-1], -1)


def _by_key_head(config: PreTrainedConfig, joined: Numbers, gate: Numbers) -> Numbers:
    """Qwen3-Next: the file has queries, keys and values of all heads and then the gates; the parameter those of each key head."""
    heads, width = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    both = np.concatenate([joined, gate])
    starts = np.cumsum([0, heads * width, heads * width, heads * values])
    sizes = (width, width, values, values)
    rows = [
        np.arange(start + head * size, start + (head + 1) * size)
        for head in range(heads)
        for start, size in zip(starts, sizes, strict=True)
    ]
    return both[np.concatenate(rows)]


def _tiled(config: PreTrainedConfig, count: int) -> Rows:
    """Places of ``count`` rows or columns of value heads in a Qwen3.5 file: one of each key head, then the next of each."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    written = np.arange(count).reshape(keys, heads // keys, -1).swapaxes(0, 1).reshape(-1)
    return np.argsort(written)


def _as_parameter(architecture: str, tensor: GgufTensor, shape: tuple[int, ...], config: PreTrainedConfig) -> StoredTensor:
    """What the converter did to the parameter, undone."""
    inner = tensor.name.split(".", 2)[2] if tensor.name.startswith("blk.") else tensor.name
    if architecture in _NEIGHBOURS and inner.startswith(("attn_q.", "attn_k.")):  # they rotate neighbours, not halves
        heads = config.num_attention_heads if inner.startswith("attn_q.") else config.num_key_value_heads
        order = np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return _GgufRows(tensor, shape, order)
    if architecture in _SHIFTED and inner.endswith("norm.weight") and inner != "ssm_norm.weight":
        return _GgufRows(tensor, shape, shift=1.0)
    if architecture == "gpt2" and len(shape) == 2 and tensor.name.startswith("blk."):
        return _GgufRows(tensor, shape, transposed=True)
    if architecture.startswith("qwen35"):
        return _of_value_heads(tensor, inner, shape, config)
    return _GgufRows(tensor, shape)


def _of_value_heads(tensor: GgufTensor, inner: str, shape: tuple[int, ...], config: PreTrainedConfig) -> StoredTensor:
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if inner == "ssm_out.weight":
        return _GgufRows(tensor, shape, columns=_tiled(config, shape[1]))
    if inner in ("attn_qkv.weight", "ssm_conv1d.weight"):
        return _GgufRows(tensor, shape, np.concatenate([np.arange(before), before + _tiled(config, shape[0] - before)]))
    if inner in ("attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight", "ssm_dt.bias"):
        return _GgufRows(tensor, shape, _tiled(config, shape[0]))
    return _GgufRows(tensor, shape)
