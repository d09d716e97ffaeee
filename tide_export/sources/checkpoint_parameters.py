"""The parameters of a model from its safetensors files, one at a time, as transformers' loader makes them of the tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import torch
from safetensors import safe_open
from tide_runtime.errors import ModelFilesError
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key

from tide_export.sources.accounting import TensorHeader, check_shapes, first_names, tensor_uses
from tide_export.weights.quantized_weight import QuantizedWeight


class CheckpointParameters:
    """A `ParameterSource` over ``files``, which stay mapped.

    Args:
        source: name for messages.
        model: with fake parameters; `accounting.check_names` has accepted the files' tensors, ``headers``.

    Raises ModelFilesError for tensors of other shapes than the model's, and for tied parameters with different values.
    """

    def __init__(self, source: str, model: PreTrainedModel, files: Sequence[Path], headers: Mapping[str, TensorHeader]) -> None:
        self._source, self._model = source, model
        opened = [safe_open(file, framework="pt") for file in files]
        self._holder = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        converters = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightConverter)]
        self._converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        self._expected = model.state_dict(keep_vars=True)
        self._uses = tensor_uses(model, headers).by_target
        self._target = {name: target for target in self._uses for name in self._filled(target)}
        self._check_shapes({target: headers[name].shape for target in self._uses if (name := self._single(target))})
        self._stored_names = self._tie()

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def value(self, name: str) -> torch.Tensor:
        made = self._make(self._stored_names[name])
        self._check_shapes({name: made.shape})
        return made

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        stored_name = self._stored_names[name]
        if (stored := self._single(self._target[stored_name])) is None:
            return self.value(name)[first : first + count].clone()  # a view would hold the matrix
        return self._holder[stored].get_slice(stored)[first : first + count].to(self._expected[stored_name].dtype)

    def quantized(self, name: str) -> QuantizedWeight | None:
        return None

    def fill_buffers(self) -> None:
        """Copy the buffers that the files hold into the model."""
        for name, buffer in self._model.named_buffers():
            if name in self._target:
                buffer.copy_(self._make(name))

    def _single(self, target: str) -> str | None:
        """The tensor that is ``target`` as it is stored; None where it is converted."""
        pattern, names = next(iter(self._uses[target].items()))
        return pattern if names == [pattern] else None

    def _filled(self, target: str) -> list[str]:
        """The parameters that are made of the same tensors as ``target``."""
        if self._single(target):
            return [target]
        first, *others = self._converters[next(iter(self._uses[target]))].target_patterns
        return [target, *(target.replace(first, other) for other in others)]

    def _make(self, name: str) -> torch.Tensor:
        target = self._target[name]
        dtype = self._expected[name].dtype
        if stored := self._single(target):
            return self._holder[stored].get_tensor(stored).to(dtype)
        patterns = {tensor: pattern for pattern, tensors in self._uses[target].items() for tensor in tensors}
        converter = deepcopy(self._converters[next(iter(patterns.values()))])
        for tensor in sorted(patterns, key=dot_natural_key):
            read = lambda tensor=tensor: self._holder[tensor].get_tensor(tensor).to(dtype)  # noqa: E731
            converter.add_tensor(target, tensor, patterns[tensor], read)
        made = converter.convert(target, model=self._model, config=self._model.config)[name]
        return made[0] if isinstance(made, list) else made

    def _check_shapes(self, found: Mapping[str, Sequence[int]]) -> None:
        check_shapes(self._source, [(name, shape, self._expected[name].shape) for name, shape in found.items()])

    def _tie(self) -> dict[str, str]:
        """Name of a parameter → the name under which the files hold it."""
        groups: dict[str, list[str]] = {}
        for name, first in first_names(self._model).items():
            groups.setdefault(first, []).append(name)
        stored_names: dict[str, str] = {}
        for names in groups.values():
            stored, *others = [name for name in names if name in self._target]
            for other in others:
                if not torch.equal(self._make(stored), self._make(other)):
                    raise ModelFilesError(
                        f"{self._source} holds {stored} and {other} with different values, and its config.json ties them: set "
                        f"tie_word_embeddings to false if both are meant, or delete {other}"
                    )
            stored_names |= dict.fromkeys(names, stored)
        return stored_names
