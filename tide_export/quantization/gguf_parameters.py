"""The parameters of a model from the tensors of its GGUF file, each made when it is asked for.

transformers' processors rename tensors, and put rows into another order or change values for some architectures. Which row of a
tensor is which of the parameter is what the processor makes of the rows' numbers, so low-bit blocks need not be dequantised.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import ModelFilesError, UnsupportedModelError
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from tide_export.accounting import check_shapes, first_names
from tide_export.quantization.deferred_weight import DeferredWeight, RecentWeights, deferred
from tide_export.quantization.gguf_blocks import mapped
from tide_export.quantization.gguf_file import PLAIN, GgufTensor
from tide_export.quantization.gguf_rope import FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS, WITH_LONG_FACTORS
from tide_export.quantization.quantized_weight import QuantizedWeight

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
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        self._mapping = _parameter_names(model, architecture, self._processor)
        self._first = first_names(model)
        self._expected = {name: model.get_parameter(name) for name in self._first}
        self._sources = self._assigned(model, architecture)
        self._orders = {name: self._row_order(name) for name in self._sources}
        self.low_bits, self.notes = self._low_bit_weights()

    def names(self) -> Collection[str]:
        return self._first.keys()

    def value(self, name: str) -> torch.Tensor:
        return self._dequantized(name, self._sources[self._first[name]]).to(self._expected[name].dtype)

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        order = self._orders[self._first[name]]
        if order is None:
            return self.value(name)[first : first + count].clone()  # a view would hold the matrix
        (tensor,) = self._sources[self._first[name]]
        return torch.from_numpy(_dequantized(tensor, tensor.data[order[first : first + count]])).to(self._expected[name].dtype)

    def quantized(self, name: str) -> QuantizedWeight | None:
        weight = self.low_bits.get(name)
        return weight.made() if weight is not None else None

    def _assigned(self, model: PreTrainedModel, architecture: str) -> dict[str, list[GgufTensor]]:
        """First name of each parameter → its tensors."""
        names = {_with_suffix(name): parameter for name, parameter in self._mapping.items()}
        sources: dict[str, list[GgufTensor]] = defaultdict(list)
        unknown = []
        for name, tensor in self._tensors.items():
            if name in names:
                sources[self._first.get(names[name], names[name])].append(tensor)
            elif not _without_effect(name, architecture):
                unknown.append(name)
        layers = model.config.get_text_config().num_hidden_layers
        beyond = [name for name in unknown if (found := _LAYER.match(name)) and int(found[1]) >= layers]
        if beyond:
            raise ModelFilesError(f"{self._file} has the tensor {min(beyond)}, but its config says {layers} layers; {_REMEDY}")
        filled = {names[tensor.name] for found in sources.values() for tensor in found}
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        missing = {name for name, parameter in names.items() if name not in self._tensors and parameter not in tied}
        if missing:
            raise ModelFilesError(
                f"{self._file} has no tensor {min(missing)} for {names[min(missing)]}, which its config expects; {_REMEDY}"
            )
        if unknown:
            raise ModelFilesError(
                f"{self._file} has the tensor {min(unknown)}, which the architecture {architecture!r} has no place for, so the "
                "bundle would be another model; export the HuggingFace checkpoint that the file was made from"
            )
        lacking = set(self._first.values()) - sources.keys()
        if lacking or not filled <= self._first.keys():
            named = min(lacking or filled - self._first.keys())
            raise UnsupportedModelError(
                f"{self._file}: nothing says which tensor of the architecture {architecture!r} is {named}; export the "
                "HuggingFace checkpoint that the file was made from"
            )
        return dict(sources)

    def _dequantized(self, name: str, tensors: Sequence[GgufTensor]) -> torch.Tensor:
        """fp32, of the parameter's shape, as transformers' processor has it."""
        state: dict[str, torch.Tensor] = {}
        for tensor in tensors:
            made = self._processed(tensor.name, _dequantized(tensor, tensor.data), state)
            if made is not None:
                state[self._mapping[tensor.name]] = torch.from_numpy(np.require(made, np.float32, ["C", "W"]))
        (value,) = state.values()
        check_shapes(self._file, [(name, value.shape, self._expected[name].shape)])
        return value

    def _processed(self, tensor: str, values: NDArray, state: dict[str, torch.Tensor]) -> NDArray | None:
        """``values`` of ``tensor`` as transformers' processor has them; None where it put them into ``state``."""
        read = {"tensor_key_mapping": self._mapping, "parsed_parameters": {"tensors": state}}
        done = self._processor.process(weights=values, name=tensor, **read)
        return done.weights if done.name is not None else None

    def _row_order(self, name: str) -> NDArray[np.int64] | None:
        """The tensor's row for each row of the parameter; None where its rows are not those of one matrix."""
        tensor, *others = self._sources[name]
        if others or len(tensor.shape) != 2:
            return None
        rows = np.arange(tensor.shape[0])
        numbers = np.stack([2 * rows, 2 * rows + 1], 1)  # two columns: a transposed matrix is not taken for its rows
        made = self._processed(tensor.name, numbers, {})
        if made is None or made.shape != numbers.shape:
            return None
        order = made[:, 0] // 2
        if not np.array_equal(np.sort(order), rows) or not np.array_equal(made, numbers[order]):
            return None
        check_shapes(self._file, [(name, tensor.shape, self._expected[name].shape)])
        return order

    def _low_bit_weights(self) -> tuple[dict[str, DeferredWeight], list[str]]:
        found: dict[str, DeferredWeight] = {}
        lost: Counter[tuple[str, str]] = Counter()
        recent = RecentWeights()
        for name, tensors in self._sources.items():
            for tensor in [tensor for tensor in tensors if tensor.kind not in PLAIN]:
                order = self._orders[name]
                sample = mapped(tensor.data[:1], tensor.kind) if tensor.data.ndim == 2 else None
                if tensor.data.ndim == 3:
                    lost[tensor.kind, "holds the matrices of several experts"] += 1
                elif sample is None:
                    lost[tensor.kind, "has no layout that the kernels take"] += 1
                elif order is None:
                    lost[tensor.kind, "is stored in another form than transformers' parameter"] += 1
                else:
                    make = partial(recent.get, name, partial(_in_order, tensor, order))
                    found[name] = deferred(sample, (tensor.shape[0], tensor.shape[1]), make)
        notes = [f"{count} tensors of type {kind} were dequantised: that {why}" for (kind, why), count in sorted(lost.items())]
        return {name: found[first] for name, first in self._first.items() if first in found}, notes


def _in_order(tensor: GgufTensor, order: NDArray[np.int64]) -> QuantizedWeight:
    weight = mapped(tensor.data, tensor.kind)
    assert weight is not None
    return weight if np.array_equal(order, np.arange(len(order))) else weight.rows(order)


def _dequantized(tensor: GgufTensor, data: NDArray) -> NDArray[np.float32]:
    import gguf

    return gguf.dequantize(data, gguf.GGMLQuantizationType[tensor.kind])


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
        found = table.get_name(name.removesuffix(suffix))
        if found is None:
            processor.perform_fallback_tensor_mapping(mapping, suffix, "", name)
        else:
            mapping[found + suffix] = name
    return mapping


def _with_suffix(name: str) -> str:
    """transformers' table has the experts' tensors without it."""
    return name if name.endswith((".weight", ".bias")) else f"{name}.weight"


def _without_effect(name: str, architecture: str) -> bool:
    """Rotary frequencies that llama.cpp skips; factors that it divides by are applied where the model is made."""
    divides = name == FREQUENCY_FACTORS and architecture == "llama"
    extends = name in (LONG_FACTORS, SHORT_FACTORS) and architecture in WITH_LONG_FACTORS
    return name.endswith("attn_rot_embd.weight") or divides or extends
