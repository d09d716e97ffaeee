"""Parameters in low bits, each quantised when it is written or all at once, for a model that is held in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tide_export.model.fake_parameters import is_fake, materialise
from tide_export.quantize.quantizers import BLOCK_SIZE, Matrix, dequantize_parameters, matrices_of, round_to_nearest
from tide_export.sources.accounting import first_names
from tide_export.sources.loaded_model import LoadedModel
from tide_export.sources.parameters import ParameterSource
from tide_export.weights.deferred_weight import LowBits, RecentWeights, deferred, deferred_integer
from tide_export.weights.quantized_weight import QuantizedWeight, integer_rows


class QuantizedParameters:
    """A `ParameterSource` of the matrices of another one in ``bits``, head and embedding in 8.

    Args:
        stored: low-bit weights of the source. Those of the wanted bits stay as they are: rounding them again would add its error.
        smoothing: by parameter name, of the matrices that become products of integers.
        done: low-bit weights by parameter name that stay as they are, in whatever bits.

    Attributes:
        low_bits: by parameter name.
        notes: a sentence on the matrices left as they are.
    """

    def __init__(
        self,
        inner: ParameterSource,
        model: PreTrainedModel,
        bits: int,
        stored: Mapping[str, LowBits],
        smoothing: Mapping[str, NDArray[np.float32]] | None = None,
        done: Mapping[str, QuantizedWeight] | None = None,
    ) -> None:
        self._inner = inner
        self._model = model
        self._first = first_names(model)
        recent = RecentWeights()
        matrices = list(matrices_of(model, bits))
        self._transposed = {matrix.name for matrix in matrices if matrix.transposed}
        distinct = {self._first[matrix.name]: matrix for matrix in reversed(matrices)}
        # What is rounded to nearest: a row does not depend on the others. What is quantised, and only as a whole.
        self._row_by_row, self._made_whole = set[str](), set[str]()
        self._smoothing = {self._first[name]: scales for name, scales in (smoothing or {}).items()}
        weights: dict[str, LowBits] = {}
        for name, matrix in distinct.items():
            original = stored.get(name)
            if done is not None and name in done:
                weights[name] = done[name]
            elif (scales := self._smoothing.get(name)) is not None:
                weights[name] = deferred_integer(matrix.shape, scales, partial(recent.get, name, partial(self._quantize, matrix)))
                (self._made_whole if matrix.transposed else self._row_by_row).add(name)
            elif original is not None and original.bits == matrix.bits:
                weights[name] = original
            elif matrix.fits:
                make = partial(recent.get, name, partial(self._quantize, matrix))
                weights[name] = deferred(round_to_nearest(_SAMPLE, matrix.bits), matrix.shape, make)
                (self._row_by_row if matrix.bits == 8 and not matrix.transposed else self._made_whole).add(name)
        self.low_bits = {name: weights[first] for name, first in self._first.items() if first in weights}
        left = sum(matrix.name not in self.low_bits for matrix in matrices)
        self.notes = [f"{left} matrices whose input is no multiple of {BLOCK_SIZE} wide keep their precision"] if left else []

    def names(self) -> Collection[str]:
        return self._inner.names()

    def value(self, name: str) -> torch.Tensor:
        weight = self.quantized(name)
        if weight is None:
            return self._inner.value(name)
        like = self._model.get_parameter(name)
        values = torch.from_numpy(weight.dequantized()).to(like.dtype)
        return values.T if name in self._transposed else values.view(like.shape)

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        if self._first[name] in self._made_whole:
            return self.value(name)[first : first + count].clone()  # a view would hold the matrix
        rows = self._inner.rows(name, first, count)
        if self._first[name] not in self._row_by_row:
            return rows
        scales = self._smoothing.get(self._first[name])
        values = rows.float().numpy()
        rounded = round_to_nearest(values, 8) if scales is None else integer_rows(values, scales)
        return torch.from_numpy(rounded.dequantized()).to(rows.dtype)

    def quantized(self, name: str) -> QuantizedWeight | None:
        weight = self.low_bits.get(name)
        return weight.materialize() if weight is not None else None

    def _quantize(self, matrix: Matrix) -> QuantizedWeight:
        values = self._inner.value(matrix.name).float()
        array = (values.T if matrix.transposed else values.flatten(0, -2)).numpy()
        if (scales := self._smoothing.get(self._first[matrix.name])) is not None:
            return integer_rows(array, scales)
        return round_to_nearest(array, matrix.bits)


_SAMPLE = np.linspace(-1, 1, 2 * BLOCK_SIZE, dtype=np.float32)[None]


def in_memory(loaded: LoadedModel, advance: Callable[[int, int], None] | None = None) -> LoadedModel:
    """A streamed model with its parameters and low-bit weights in memory; the same model's object. Others as they are.

    ``advance``: called with the number of low-bit weights made, and of all.
    """
    if loaded.streamed is None:
        return loaded
    distinct = {id(weight): weight for weight in loaded.quantized.values()}
    made: dict[int, QuantizedWeight] = {}
    for key, weight in distinct.items():
        made[key] = weight.materialize()
        if advance is not None:
            advance(len(made), len(distinct))
    quantized = {name: made[id(weight)] for name, weight in loaded.quantized.items()}
    if is_fake(loaded.model):
        materialise(loaded.model, loaded.streamed.value)
    else:
        dequantize_parameters(loaded.model, quantized)
    return replace(loaded, quantized=quantized, streamed=None)
