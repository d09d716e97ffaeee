"""Where a model's parameters come from, one at a time: tracing needs none of them, and a pass needs those of one layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from transformers import PreTrainedModel

from tide_export.weights.quantized_weight import QuantizedWeight


class ParameterSource(Protocol):
    """The parameters of a transformers model by name, tied ones under every name."""

    def names(self) -> Collection[str]: ...

    def value(self, name: str) -> torch.Tensor:
        """The parameter as the eager model computes with it: dequantised, in the model's dtype. Made anew on each call."""

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """``count`` rows of it from ``first`` on, for embedding and head."""

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Its low-bit form, made anew on each call; None where it is kept in the model's dtype."""


class LoadedParameters:
    """The parameters of a model in memory. ``quantized``: their low-bit forms by name."""

    def __init__(self, model: PreTrainedModel, quantized: Mapping[str, QuantizedWeight] | None = None) -> None:
        self._parameters = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
        self._quantized = quantized or {}

    def names(self) -> Collection[str]:
        return self._parameters.keys()

    def value(self, name: str) -> torch.Tensor:
        return self._parameters[name]

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        return self._parameters[name][first : first + count]

    def quantized(self, name: str) -> QuantizedWeight | None:
        return self._quantized.get(name)
