"""The parameters of a model from the tensors of its GGUF file, each made when it is asked for.

transformers' processors rename tensors, and put rows into another order or change values for some architectures. Which row of a
tensor is which of the parameter is what the processor makes of the rows' numbers, so low-bit blocks need not be dequantised.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import ModelFilesError, UnsupportedModelError
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from tide_export.sources.accounting import check_shapes, first_names
from tide_export.sources.gguf.gguf_blocks import mapped
from tide_export.sources.gguf.gguf_file import PLAIN, GgufTensor
from tide_export.sources.gguf.gguf_forms import FORMED, Form, tensor_forms
from tide_export.sources.gguf.gguf_rope import (
    FREQUENCY_FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    WITH_FREQUENCY_FACTORS,
    WITH_LONG_FACTORS,
)
from tide_export.weights.deferred_weight import DeferredWeight, RecentWeights, deferred
from tide_export.weights.quantized_weight import QuantizedWeight, block_order, by_rows, stacked

# Architectures whose tensors the converter changes as it does those of another that transformers reads.
_CONVERTED_AS = {
    "granite": "llama",
    "smollm3": "llama",
    "mistral3": "llama",
    "arcee": "llama",
    "olmoe": "qwen2moe",
    "gemma": "gemma2",
}
_LAYER = re.compile(r"blk\.(\d+)\.")
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
        self._file, self._tensors = file, tensors
        self._first = first_names(model)
        self._expected: dict[str, torch.Tensor] = {name: model.get_parameter(name) for name in self._first}
        buffers = {name: model.get_buffer(name) for name in model.state_dict() if name not in self._first}
        self._expected |= buffers
        self._forms = self._assigned(model, architecture, _forms(model, architecture, tensors))
        self._orders = {name: self._row_order(name) for name in self._forms}
        for name, buffer in buffers.items():
            buffer.copy_(self._dequantized(name))
        self.low_bits, self.notes = self._low_bit_weights()

    def names(self) -> Collection[str]:
        return self._first.keys()

    def value(self, name: str) -> torch.Tensor:
        return self._dequantized(self._first[name]).to(self._expected[name].dtype)

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        order = self._orders[self._first[name]]
        form = self._forms[self._first[name]]
        if order is None or len(form.tensors) > 1 or form.columns is not None:
            return self.value(name)[first : first + count].clone()  # a view would hold the matrix
        tensor = self._tensors[form.tensors[0]]
        return torch.from_numpy(_dequantized(tensor, tensor.data[order[first : first + count]])).to(self._expected[name].dtype)

    def quantized(self, name: str) -> QuantizedWeight | None:
        weight = self.low_bits.get(name)
        return weight.made() if weight is not None else None

    def _assigned(self, model: PreTrainedModel, architecture: str, forms: Mapping[str, Form]) -> dict[str, Form]:
        """First name of each parameter, and name of each buffer → its form."""
        names = {tensor: name for name, form in forms.items() for tensor in form.tensors}
        unknown = [name for name in self._tensors if name not in names and not _without_effect(name, architecture)]
        layers = model.config.get_text_config().num_hidden_layers
        beyond = [name for name in unknown if (found := _LAYER.match(name)) and int(found[1]) >= layers]
        if beyond:
            raise ModelFilesError(f"{self._file} has the tensor {min(beyond)}, but its config says {layers} layers; {_REMEDY}")
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        missing = {tensor for tensor, name in names.items() if tensor not in self._tensors and name not in tied}
        if missing:
            raise ModelFilesError(
                f"{self._file} has no tensor {min(missing)} for {names[min(missing)]}, which its config expects; {_REMEDY}"
            )
        if unknown:
            raise ModelFilesError(
                f"{self._file} has the tensor {min(unknown)}, which the architecture {architecture!r} has no place for, so the "
                "bundle would be another model; export the HuggingFace checkpoint that the file was made from"
            )
        filled = {self._first.get(n, n): form for n, form in forms.items() if all(t in self._tensors for t in form.tensors)}
        expected = {self._first.get(name, name) for name in self._expected}
        if differing := filled.keys() ^ expected:
            raise UnsupportedModelError(
                f"{self._file}: nothing says which tensor of the architecture {architecture!r} is {min(differing)}; export the "
                "HuggingFace checkpoint that the file was made from"
            )
        return filled

    def _dequantized(self, name: str) -> torch.Tensor:
        """fp32, of the parameter's shape."""
        form = self._forms[name]
        tensors = [self._tensors[tensor] for tensor in form.tensors]
        made = form.value(*(_dequantized(tensor, tensor.data) for tensor in tensors))
        check_shapes(self._file, [(name, made.shape, self._expected[name].shape)])
        return torch.from_numpy(np.require(made, np.float32, ["C", "W"]))

    def _row_order(self, name: str) -> NDArray[np.int64] | None:
        """The row, of its tensors one above the other, for each row of the parameter; None where it is no matrix of such rows."""
        form = self._forms[name]
        shapes = [self._tensors[tensor].shape for tensor in form.tensors]
        if self._expected[name].ndim != 2 or any(len(shape) != 2 for shape in shapes) or len({k for _, k in shapes}) > 1:
            return None
        rows = np.arange(sum(count for count, _ in shapes))
        numbers = np.stack([2 * rows, 2 * rows + 1], 1)  # two columns: a transposed matrix is not taken for its rows
        made = form.make(*np.split(numbers, np.cumsum([count for count, _ in shapes])[:-1]))
        if made.shape != numbers.shape:
            return None
        order = made[:, 0] // 2
        if not np.array_equal(np.sort(order), rows) or not np.array_equal(made, numbers[order]):
            return None
        check_shapes(self._file, [(name, (len(rows), shapes[0][1]), self._expected[name].shape)])
        return order

    def _low_bit_weights(self) -> tuple[dict[str, DeferredWeight], list[str]]:
        found: dict[str, DeferredWeight] = {}
        lost: Counter[tuple[str, str]] = Counter()
        recent = RecentWeights()
        for name, form in self._forms.items():
            tensors = [self._tensors[tensor] for tensor in form.tensors]
            sample = mapped(tensors[0].data[:1], tensors[0].kind) if tensors[0].data.ndim == 2 else None
            if sample is not None and (reason := self._not_in_blocks(name, sample)) is None:
                make = partial(recent.get, name, partial(_in_order, tensors, self._orders[name], form.columns))
                rows = sum(tensor.shape[0] for tensor in tensors)
                found[name] = deferred(sample, (rows, tensors[0].shape[1]), make)
                continue
            for tensor in [tensor for tensor in tensors if tensor.kind not in PLAIN]:
                if tensor.data.ndim == 3:
                    lost[tensor.kind, "holds the matrices of several experts"] += 1
                else:
                    lost[tensor.kind, "has no layout that the kernels take" if sample is None else str(reason)] += 1
        notes = [f"{count} tensors of type {kind} were dequantised: that {why}" for (kind, why), count in sorted(lost.items())]
        return {name: found[first] for name, first in self._first.items() if first in found}, notes

    def _not_in_blocks(self, name: str, sample: QuantizedWeight) -> str | None:
        """Why the blocks of a matrix in ``sample``'s form cannot be kept; None where they can."""
        form = self._forms[name]
        if len({self._tensors[tensor].kind for tensor in form.tensors}) > 1:
            return "is one matrix with a tensor of another type"
        if self._orders[name] is None:
            return "is stored in another form than transformers' parameter"
        if form.columns is not None and block_order(form.columns, sample.block_size) is None:
            return "has blocks of other columns than the parameter's"
        return None


def _in_order(
    tensors: Sequence[GgufTensor], order: NDArray[np.int64] | None, columns: NDArray[np.int64] | None
) -> QuantizedWeight:
    parts = [weight for tensor in tensors if (weight := mapped(tensor.data, tensor.kind)) is not None]
    weight = parts[0] if len(parts) == 1 else stacked(parts)
    assert weight is not None and order is not None
    if not np.array_equal(order, np.arange(len(order))):
        weight = weight.rows(order)
    if columns is None:
        return weight
    blocks = block_order(columns, weight.block_size)
    assert blocks is not None
    return weight.blocks(blocks)


def _dequantized(tensor: GgufTensor, data: NDArray) -> NDArray[np.float32]:
    import gguf

    kind = gguf.GGMLQuantizationType[tensor.kind]
    if data.ndim == 1:
        return gguf.dequantize(data, kind)
    values = np.empty((len(data), *tensor.shape[1:]), np.float32)

    def decode(part: slice) -> None:
        values[part] = gguf.dequantize(data[part], kind)

    by_rows(len(data), decode)
    return values


def _forms(model: PreTrainedModel, architecture: str, stored: Collection[str]) -> dict[str, Form]:
    if architecture in FORMED:
        return tensor_forms(architecture, model.config, model.state_dict(), stored)
    processor = TENSOR_PROCESSORS.get(_CONVERTED_AS.get(architecture, architecture), TensorProcessor)(
        config=model.config.to_dict()
    )
    mapping = _parameter_names(model, architecture, processor)
    tensors: dict[str, list[str]] = defaultdict(list)
    for tensor, name in mapping.items():
        tensors[name].append(_with_suffix(tensor))
    return {name: Form(tuple(names), partial(_processed, processor, mapping, names)) for name, names in tensors.items()}


def _processed(processor: TensorProcessor, mapping: Mapping[str, str], names: Sequence[str], *arrays: NDArray) -> NDArray:
    """What transformers' processor makes of the tensors ``names``: it returns a parameter or puts its parts into a state dict."""
    state: dict[str, Any] = {}
    for name, values in zip(names, arrays, strict=True):
        read = {"tensor_key_mapping": mapping, "parsed_parameters": {"tensors": state}}
        done = processor.process(weights=values, name=name, **read)
        if done.name is not None:
            state[name] = done.weights
    (value,) = state.values()
    return np.asarray(value)


def _parameter_names(model: PreTrainedModel, architecture: str, processor: TensorProcessor) -> dict[str, str]:
    """The tensor's name in the file → the model's, as transformers' `get_gguf_hf_weights_map` has them.

    That function makes gguf's table of names anew for each module of the model, which takes 9 s for SmolLM2.
    """
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        raise UnsupportedModelError(f"the file's architecture {architecture!r} is unknown to gguf; upgrade the package gguf")
    table = gguf.get_tensor_name_map(kinds[architecture], model.config.get_text_config().num_hidden_layers)
    mapping: dict[str, str] = {}
    for own in model.state_dict():
        name = processor.preprocess_name(own)
        suffix = next((suffix for suffix in (".weight", ".bias") if name.endswith(suffix)), "")
        found = table.get_name(name.removesuffix(suffix)) or _scales(name)
        if found is None:
            processor.perform_fallback_tensor_mapping(mapping, suffix, "", name)
        else:
            mapping[found + suffix] = name
    return mapping


def _scales(name: str) -> str | None:
    """Gemma 4's scales of the router and of experts, which have no name in gguf's table."""
    prefix, _, inner = name.replace("model.layers.", "blk.", 1).partition(".router.")
    tensors = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
    return f"{prefix}.{tensors[inner]}" if inner in tensors else None


def _with_suffix(name: str) -> str:
    """transformers' table has the experts' tensors without it."""
    return name if name.endswith((".weight", ".bias", ".scale")) else f"{name}.weight"


def _without_effect(name: str, architecture: str) -> bool:
    """Rotary frequencies that llama.cpp skips; factors that it divides by are applied where the model is made."""
    divides = name == FREQUENCY_FACTORS and architecture in WITH_FREQUENCY_FACTORS
    extends = name in (LONG_FACTORS, SHORT_FACTORS) and architecture in WITH_LONG_FACTORS
    return name.endswith("attn_rot_embd.weight") or divides or extends
