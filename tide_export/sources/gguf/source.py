"""A GGUF file as a model of transformers with fake parameters, whose values stay in the file until they are asked for.

Which tensors a parameter is made of, and what llama.cpp's converter did to them, undone: conversion/*.py of
https://github.com/ggml-org/llama.cpp. Which row of a tensor is which of the parameter is what `Form.make` makes of the rows'
numbers, so low-bit blocks need not be dequantised.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from tide_runtime.bundle.embedding_info import EmbeddingInfo
from tide_runtime.errors import ModelFilesError, TideError, UnsupportedModelError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tide_export.model.embedding_model import give_states
from tide_export.model.fake_parameters import convert, without_parameters
from tide_export.sources.accounting import check_shapes, first_names
from tide_export.sources.gguf.architectures import read_config
from tide_export.sources.gguf.config import FREQUENCY_FACTORS, divide_frequencies, read_pooling, without_effect
from tide_export.sources.gguf.file import PLAIN, GgufTensor, Metadata, mapped, read_file
from tide_export.sources.gguf.tokenizer import generation_config, sampling_note
from tide_export.weights.deferred_weight import DeferredWeight, RecentWeights, deferred
from tide_export.weights.quantized_weight import QuantizedWeight, block_order, stacked

# What transformers raises for values of a file that make no model; NotImplementedError is a RuntimeError.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, OSError, StrictDataclassError)


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, GgufParameters, EmbeddingInfo | None]:
    """The model with fake parameters in ``dtype``, their values, and how it embeds texts, where it does: see `give_states`.

    Raises ModelFilesError for a broken file, UnsupportedModelError for an architecture or a key that the model has no place for.
    """
    keys, tensors = read_file(path)
    embedding = read_pooling(keys)
    try:
        config = read_config(keys, tensors)
        model = without_parameters(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32))
        # Buffers stay in fp32: rotary frequencies that are rounded to fp16 turn by a radian at position 2,000.
        convert(model, dtype)
        if embedding is not None:
            give_states(model)
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("output.")}
        unused = _unused(keys, config, tensors)
        parameters = GgufParameters(path.name, model, keys.architecture, {n: t for n, t in tensors.items() if n not in unused})
        if unused:
            parameters.notes.append(
                f"{len(unused)} tensors were left out, such as {min(unused)}: the model's own output does not depend on them"
            )
        if (factors := tensors.get(FREQUENCY_FACTORS)) is not None:
            divide_frequencies(model, torch.from_numpy(np.array(factors.data, np.float32)))
    except TideError:
        raise
    except UNREADABLE as error:
        raise UnsupportedModelError(
            f"{path.name} cannot be loaded, architecture {keys.architecture!r} ({first_line(error)}); convert the model from "
            "its HuggingFace checkpoint, or export that checkpoint itself"
        ) from error
    model.generation_config = generation_config(keys, config.vocab_size)
    if (note := sampling_note(keys)) is not None:
        parameters.notes.append(note)
    return model, parameters, embedding


def _unused(keys: Metadata, config: PreTrainedConfig, tensors: Collection[str]) -> set[str]:
    """Those of layers that only draft further tokens, and keys and values of layers that take an earlier layer's."""
    layers = config.num_hidden_layers
    drafting = range(layers, keys.take("block_count")) if keys.take("nextn_predict_layers", 0) else ()
    taking = range(layers - keys.take("attention.shared_kv_layers", 0), layers)
    prefixes = [f"blk.{layer}." for layer in drafting]
    prefixes += [f"blk.{layer}.{name}." for layer in taking for name in ("attn_k", "attn_v", "attn_k_norm")]
    return {name for name in tensors if name.startswith(tuple(prefixes))}


def first_line(error: Exception) -> str:
    """What ``error`` says; a heading together with the line below it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])


_BLOCK = re.compile(r"blk\.(\d+)\.")
_REMEDY = "the file was changed or its conversion went wrong: download it again, or convert the model again"


class GgufParameters:
    """A `ParameterSource` over the ``tensors`` of the file named ``file``.

    Args:
        model: with fake parameters; values have their dtypes.

    Attributes:
        low_bits: by parameter name, those that the bundle keeps in low bits.
        notes: a sentence on each kind of low-bit tensor that is dequantised instead.

    Raises ModelFilesError unless each parameter has its tensors, in its shape, and each tensor its parameter.
    """

    def __init__(self, file: str, model: PreTrainedModel, architecture: str, tensors: Mapping[str, GgufTensor]) -> None:
        self._first = first_names(model)
        expected: dict[str, torch.Tensor] = {name: model.get_parameter(name) for name in self._first}
        buffers = {name: model.get_buffer(name) for name in model.state_dict() if name not in self._first}
        expected |= buffers
        forms = tensor_forms(architecture, model.config, model.state_dict(), tensors)
        _check_tensors(file, model, architecture, forms, tensors)
        filled = {self._first.get(n, n): form for n, form in forms.items() if all(t in tensors for t in form.tensors)}
        if differing := filled.keys() ^ {self._first.get(name, name) for name in expected}:
            raise UnsupportedModelError(
                f"{file}: nothing says which tensor of the architecture {architecture!r} is {min(differing)}; export the "
                "HuggingFace checkpoint that the file was made from"
            )
        self._stored = {
            name: _Stored(file, name, expected[name], tuple(tensors[tensor] for tensor in form.tensors), form)
            for name, form in filled.items()
        }
        self.low_bits, self.notes = self._low_bit_weights()
        for name, buffer in buffers.items():
            buffer.copy_(self._stored[name].value())

    def names(self) -> Collection[str]:
        return self._first.keys()

    def value(self, name: str) -> torch.Tensor:
        return self._stored[self._first[name]].value()

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        return self._stored[self._first[name]].rows(first, count)

    def quantized(self, name: str) -> QuantizedWeight | None:
        weight = self.low_bits.get(name)
        return weight.materialize() if weight is not None else None

    def _low_bit_weights(self) -> tuple[dict[str, DeferredWeight], list[str]]:
        found: dict[str, DeferredWeight] = {}
        lost: Counter[tuple[str, str]] = Counter()
        recent = RecentWeights()
        for name, stored in self._stored.items():
            reason = stored.not_in_blocks()
            if reason is None:
                assert stored.sample is not None
                shape = (sum(tensor.shape[0] for tensor in stored.tensors), stored.tensors[0].shape[1])
                found[name] = deferred(stored.sample, shape, partial(recent.get, name, stored.in_blocks))
                continue
            for tensor in stored.tensors:
                if tensor.kind not in PLAIN:
                    lost[tensor.kind, "holds the matrices of several experts" if tensor.data.ndim == 3 else reason] += 1
        notes = [f"{count} tensors of type {kind} were dequantised: that {why}" for (kind, why), count in sorted(lost.items())]
        return {name: found[first] for name, first in self._first.items() if first in found}, notes


def _check_tensors(
    file: str, model: PreTrainedModel, architecture: str, forms: Mapping[str, Form], stored: Collection[str]
) -> None:
    """Raise ModelFilesError unless the file has the tensors of ``forms``, by parameter name, and no others with an effect."""
    names = {tensor: name for name, form in forms.items() for tensor in form.tensors}
    unknown = [name for name in stored if name not in names and not without_effect(name, architecture)]
    layers = model.config.get_text_config().num_hidden_layers
    beyond = [name for name in unknown if (found := _BLOCK.match(name)) and int(found[1]) >= layers]
    if beyond:
        raise ModelFilesError(f"{file} has the tensor {min(beyond)}, but its config says {layers} layers; {_REMEDY}")
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    missing = {tensor for tensor, name in names.items() if tensor not in stored and name not in tied}
    if missing:
        raise ModelFilesError(
            f"{file} has no tensor {min(missing)} for {names[min(missing)]}, which its config expects; {_REMEDY}"
        )
    if unknown:
        raise ModelFilesError(
            f"{file} has the tensor {min(unknown)}, which the architecture {architecture!r} has no place for, so the bundle "
            "would be another model; export the HuggingFace checkpoint that the file was made from"
        )


@dataclass(frozen=True)
class _Stored:
    """The parameter or buffer ``name``, of the shape and dtype of ``like``, which ``form`` makes of ``tensors``."""

    file: str
    name: str
    like: torch.Tensor
    tensors: tuple[GgufTensor, ...]
    form: Form

    def value(self) -> torch.Tensor:
        made = self.form.make(*(tensor.dequantized() for tensor in self.tensors))
        made = made if self.form.columns is None else made[:, self.form.columns]
        check_shapes(self.file, [(self.name, made.shape, self.like.shape)])
        return torch.from_numpy(np.require(made, np.float32, ["C", "W"])).to(self.like.dtype)

    def rows(self, first: int, count: int) -> torch.Tensor:
        if self.order is None or len(self.tensors) > 1 or self.form.columns is not None:
            return self.value()[first : first + count].clone()  # a view would hold the matrix
        return torch.from_numpy(self.tensors[0].dequantized(self.order[first : first + count])).to(self.like.dtype)

    @cached_property
    def order(self) -> NDArray[np.int64] | None:
        """The row, of its tensors one above the other, for each row of the parameter; None where it is no matrix of such rows."""
        shapes = [tensor.shape for tensor in self.tensors]
        if self.like.ndim != 2 or any(len(shape) != 2 for shape in shapes) or len({k for _, k in shapes}) > 1:
            return None
        rows = np.arange(sum(count for count, _ in shapes))
        numbers = np.stack([2 * rows, 2 * rows + 1], 1)  # two columns: a transposed matrix is not taken for its rows
        made = self.form.make(*np.split(numbers, np.cumsum([count for count, _ in shapes])[:-1]))
        if made.shape != numbers.shape:
            return None
        order = made[:, 0] // 2
        if not np.array_equal(np.sort(order), rows) or not np.array_equal(made, numbers[order]):
            return None
        check_shapes(self.file, [(self.name, (len(rows), shapes[0][1]), self.like.shape)])
        return order

    @cached_property
    def sample(self) -> QuantizedWeight | None:
        """One row of the first tensor, in blocks; None where it is no matrix in a low-bit form of ours."""
        first = self.tensors[0]
        return mapped(first.data[:1], first.kind) if first.data.ndim == 2 else None

    def not_in_blocks(self) -> str | None:
        """Why the tensors' blocks cannot be kept; None where they can."""
        order = self.order  # raises for a matrix of another shape than the parameter's
        if self.sample is None:
            return "has no layout that the kernels take"
        if len({tensor.kind for tensor in self.tensors}) > 1:
            return "is one matrix with a tensor of another type"
        if order is None:
            return "is stored in another form than transformers' parameter"
        if self.form.columns is not None and block_order(self.form.columns, self.sample.block_size) is None:
            return "has blocks of other columns than the parameter's"
        return None

    def in_blocks(self) -> QuantizedWeight:
        parts = [weight for tensor in self.tensors if (weight := mapped(tensor.data, tensor.kind)) is not None]
        weight = parts[0] if len(parts) == 1 else stacked(parts)
        assert weight is not None and self.order is not None
        if not np.array_equal(self.order, np.arange(len(self.order))):
            weight = weight.rows(self.order)
        if self.form.columns is None:
            return weight
        blocks = block_order(self.form.columns, weight.block_size)
        assert blocks is not None
        return weight.blocks(blocks)


Make = Callable[..., NDArray[Any]]


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


def tensor_forms(
    architecture: str, config: PreTrainedConfig, parameters: Collection[str], stored: Collection[str]
) -> dict[str, Form]:
    """The form of each parameter that has one.

    ``parameters``: transformers' names of parameters and persistent buffers. ``stored``: names of the file's tensors, as releases
    of the converter differ in what they join.
    """
    found: dict[str, Form] = {}
    for name in parameters:
        layer, inner = match.groups() if (match := _IN_LAYER.match(name)) else ("", name)
        if (tensors := _tensors(architecture, config, inner)) is not None:
            prefix = f"blk.{layer}." if layer else ""
            joined = _JOINED.get(tensors)
            chosen = (joined,) if joined is not None and f"{prefix}{joined}" in stored else tensors
            make, columns = _undone(architecture, config, chosen)
            found[name] = Form(tuple(f"{prefix}{tensor}" for tensor in chosen), make, columns)
    return found


_IN_LAYER = re.compile(r"(?:model\.layers|backbone\.layers|transformer\.h)\.(\d+)\.(.+)")
# What is inside a layer or outside of all of them: transformers' names, and the file's without suffix.
_MODULES = {
    "model.embed_tokens model.embeddings backbone.embeddings transformer.wte": "token_embd",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "transformer.wpe": "position_embd",
    "model.norm model.final_layernorm model.norm_f backbone.norm_f transformer.ln_f": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "input_layernorm operator_norm norm ln_1": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "ffn_norm pre_feedforward_layernorm ln_2": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm post_mlp_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "self_attn.q_proj mixer.q_proj": "attn_q",
    "self_attn.k_proj mixer.k_proj": "attn_k",
    "self_attn.v_proj mixer.v_proj": "attn_v",
    "self_attn.qkv_proj attn.c_attn linear_attn.in_proj_qkv": "attn_qkv",
    "self_attn.o_proj self_attn.out_proj mixer.o_proj attn.c_proj": "attn_output",
    "self_attn.q_norm self_attn.q_layernorm self_attn.query_layernorm": "attn_q_norm",
    "self_attn.k_norm self_attn.k_layernorm self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate_proj feed_forward.gate_proj feed_forward.w1": "ffn_gate",
    "mlp.up_proj mlp.gate_up_proj mlp.c_fc feed_forward.up_proj feed_forward.w3 mixer.up_proj": "ffn_up",
    "mlp.down_proj mlp.c_proj feed_forward.down_proj feed_forward.w2 mixer.down_proj": "ffn_down",
    "mamba.in_proj mixer.in_proj": "ssm_in",
    "mamba.conv1d mixer.conv1d linear_attn.conv1d": "ssm_conv1d",
    "mamba.norm mixer.norm linear_attn.norm": "ssm_norm",
    "mamba.out_proj mixer.out_proj linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "mlp.gate mlp.router feed_forward.gate mixer.gate block_sparse_moe.router router.proj": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
_TENSOR = {module: tensor for modules, tensor in _MODULES.items() for module in modules.split()}
# Parameters that are no module's weight or bias, by the last part of their name where nothing before it matters.
_WHOLE: Mapping[str, tuple[str, ...]] = {
    "dt_bias": ("ssm_dt.bias",),
    "A_log": ("ssm_a",),
    "D": ("ssm_d",),
    "gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "up_proj": ("ffn_up_exps.weight",),
    "down_proj": ("ffn_down_exps.weight",),
    "gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "down_proj_bias": ("ffn_down_exps.bias",),
    "expert_bias": ("exp_probs_b.bias",),
    "e_score_correction_bias": ("exp_probs_b.bias",),
    "sinks": ("attn_sinks.weight",),
    "layer_scalar": ("layer_output_scale.weight",),
    "scale": ("ffn_gate_inp.scale",),
    "per_expert_scale": ("ffn_down_exps.scale",),
    "experts.gate_up_proj": ("ffn_gate_up_exps.weight",),  # Gemma 4's
    "linear_attn.in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight"),
    "pre_ff_layernorm.weight": ("ffn_norm",),
}
_JOINED = {
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"): "ffn_gate_up_exps.weight",
    ("attn_qkv.weight", "attn_gate.weight"): "ssm_in.weight",
}


def _tensors(architecture: str, config: PreTrainedConfig, name: str) -> tuple[str, ...] | None:
    module, _, suffix = name.rpartition(".")
    if (whole := _WHOLE.get(name, _WHOLE.get(suffix))) is not None:
        return whole
    if architecture == "granitehybrid" and module.startswith("shared_mlp."):
        end = "_shexp" if config.num_local_experts else ""
        parts = ("gate", "up") if module.endswith("input_linear") else ("down",)
        return tuple(f"ffn_{part}{end}.{suffix}" for part in parts)
    if module == "post_attention_layernorm":
        return (f"{'post_attention_norm' if architecture in _NORM_BEHIND_ATTENTION else 'ffn_norm'}.{suffix}",)
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
    elif architecture in _SHIFTED and tensor.endswith("norm.weight"):
        make = _less_one
    elif architecture == "gpt2" and tensor in _TRANSPOSED:
        make = np.transpose
    elif architecture in _NEIGHBOURS and tensor.startswith(("attn_q.", "attn_k.")):
        make = partial(_halves, config.num_attention_heads if tensor.startswith("attn_q.") else config.num_key_value_heads)
    else:
        make = _as_it_is
    return _grouped_values(config, tensor, make) if architecture in _TILED else (make, None)


# Architectures in which the file's norm behind the attention has a name of its own; in others it is that of the next block.
_NORM_BEHIND_ATTENTION = (
    "exaone4", "gemma2", "gemma3", "gemma4", "gpt-oss", "olmo2", "qwen35", "qwen35moe", "qwen3next", "seed_oss"
)  # fmt: skip
# The converter puts rows that rotate together side by side.
_NEIGHBOURS = ("llama", "granite", "smollm3", "mistral3", "arcee", "granitehybrid", "nemotron_h", "nemotron_h_moe")
_SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")  # the model adds 1 to its norms' weights
_TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
_TILED = ("qwen35", "qwen35moe")


def _less_one(values: NDArray) -> NDArray:
    return values - 1


def _log_decay(values: NDArray) -> NDArray:
    """-exp(A_log), of one or two dimensions → A_log. Raises ModelFilesError for numbers that it cannot be."""
    if not (values < 0).all():
        raise ModelFilesError("a tensor ssm_a has numbers that are not below zero: the file was changed; download it again")
    return np.log(-values).reshape(-1)


_SHAPED: Mapping[str, Make] = {
    "ssm_a": _log_decay,
    "ssm_d": np.ravel,
    "ssm_norm.weight": np.ravel,
    "ssm_conv1d.weight": lambda values: values[:, None],  # [C, W] → [C, 1, W]
    "shortconv.conv.weight": lambda values: values[:, None],
    "ffn_gate_inp_shexp.weight": lambda values: values[None],
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
    pairs = len(values) // heads // 2
    return values.reshape(heads, pairs, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


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
