"""What the input features of a product are divided by before they are rounded to integers (SmoothQuant: Xiao et al. 2022, arXiv
2211.10438), and its matrix's columns multiplied by.

    s[k] = max |x[:, k]|^α / max |W[:, k]|^(1 - α)

Some features of a transformer's states are a hundred times the others, so that one scale for a row rounds all others to a few
steps. The division moves that range into the matrix, whose rows then round more. The paper takes α = 0.5 for all products. Here
each input gets the α whose expected error is least, from moments of a sample of rows: with independent rounding errors the
products' squared error is

    Σₖ ‖W'[:, k]‖² · mean over rows of step²/12  +  Σₖ mean(x'[:, k]²) · Σₙ step[n]²/12,    step = largest magnitude / 127

On SmolLM2-135M, simulated in torch, the sum of both, relative to the products, falls from 1.4e-3 to 5e-4 for down projections
and from 1.0e-3 to 9e-5 for those of query, key and value; activations with one static scale in place of one a row cost another
1% of perplexity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from tide_export.model.boundaries import decoder_layers
from tide_export.sources.parameters import ParameterSource

ALPHAS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MIN_GAIN = 1.5  # reduction factor of the expected error; a division that no norm or product absorbs costs an operator per token
_SAMPLE = 512  # rows of an input
_ROWS_AT_A_TIME, _TRIED = 1024, 256  # rows of a matrix in memory at a time, and rows on which every α is tried


@dataclass(frozen=True)
class _Matrix:
    """[N, K]. ``read``: some of the N ``rows``, from the first number on, as many as the second."""

    rows: int
    read: Callable[[int, int], Tensor]


@dataclass
class _Input:
    """An input of some products: a sample [R, K] of its rows and their matrices [N, K]."""

    states: Tensor  # as the modules get it, to tell it from others
    rows: list[Tensor]
    matrices: dict[str, _Matrix] = field(default_factory=dict)


def smoothing_scales(
    model: PreTrainedModel, source: ParameterSource, modules: Mapping[str, nn.Module], tokens: Tensor, loops: int = 1
) -> dict[str, NDArray[np.float32]]:
    """Parameter name → s [K], the same for all products of one input; ones where it gains less than `MIN_GAIN`.

    Args:
        source: of the parameters that have no storage; the model runs inside `layer_by_layer`.
        modules: linear layers by the name of their matrix. Those that the tokens do not reach, as experts may be, get ones.
        tokens: [B, T] ids of a text.
        loops: how many times the layers run.
    """
    seen = _SeenInputs(source, keeps_rows=loops > 1)
    with ExitStack() as stack, torch.no_grad():
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(seen.hook(name)).remove)
        for layer in {*decoder_layers(model)}:
            stack.callback(layer.register_forward_pre_hook(seen.end_layer).remove)
        model(input_ids=tokens, use_cache=False)
        seen.end_layer()
    return seen.scales


class _SeenInputs:
    """Collects inputs while a model runs, and decides on the scales of each when its layer has run."""

    def __init__(self, source: ParameterSource, keeps_rows: bool) -> None:
        self._source = source
        self._keeps_rows = keeps_rows
        self._open = list[_Input]()
        self._rows: dict[str, list[Tensor]] = {}  # of matrices that ran in an earlier loop
        self.scales: dict[str, NDArray[np.float32]] = {}

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen = next((one for one in self._open if one.states is inputs[0]), None)
            if seen is None:
                seen = _Input(inputs[0], [*self._rows.get(name, ()), _sample(inputs[0])])
                self._open.append(seen)
            seen.matrices[name] = self._matrix(name, module)

        return see

    def end_layer(self, *_: object) -> None:
        for seen in self._open:
            scales = best_scales(torch.cat(seen.rows), [*seen.matrices.values()]).numpy()
            self.scales |= dict.fromkeys(seen.matrices, scales)
            if self._keeps_rows:
                self._rows |= dict.fromkeys(seen.matrices, seen.rows)
        self._open.clear()

    def _matrix(self, name: str, module: nn.Module) -> _Matrix:
        weight = module.get_parameter(name.rpartition(".")[2]).detach()
        if type(weight) is not Tensor or weight.is_meta:  # the head, which runs in parts
            return _Matrix(len(weight), partial(self._source.rows, name))
        weight = weight if isinstance(module, nn.Linear) else weight.T
        return _Matrix(len(weight), lambda first, count: weight[first : first + count])


def _sample(states: Tensor) -> Tensor:
    rows = states.detach().reshape(-1, states.shape[-1])
    return rows[:: -(-len(rows) // _SAMPLE)].float().clone()


def best_scales(rows: Tensor, matrices: Sequence[_Matrix]) -> Tensor:
    """s [K] for an input of which ``rows`` [R, K] are a sample, and the ``matrices`` of its products."""
    reach = rows.abs().amax(0).clamp(min=1e-5)
    width = torch.full_like(reach, 1e-5)
    squares = torch.zeros_like(reach)
    for part in _parts(matrices):
        width = torch.maximum(width, part.abs().amax(0))
        squares += part.square().sum(0)
    tried = [torch.ones_like(reach), *(reach**alpha / width ** (1 - alpha) for alpha in ALPHAS)]
    tried = [scales / scales.log().mean().exp() for scales in tried]
    steps = torch.zeros(len(tried))  # Σ of squares over rows of the matrices, some of many
    for part in _parts(matrices):
        some = part[:: _ROWS_AT_A_TIME // _TRIED].abs()
        steps += len(part) / len(some) * torch.stack([(some * scales).amax(1).square().sum() for scales in tried])
    errors = [
        float((rows / scales).abs_().amax(1).square().mean() * (squares * scales.square()).sum())
        + float((rows / scales).square_().mean(0).sum() * step)
        for scales, step in zip(tried, steps, strict=True)
    ]
    best = min(range(len(tried)), key=errors.__getitem__)
    return tried[best if errors[best] * MIN_GAIN < errors[0] else 0]


def _parts(matrices: Sequence[_Matrix]) -> Iterator[Tensor]:
    """Some rows of one after the other: a copy of a 7B's would take hundreds of MB."""
    for matrix in matrices:
        for first in range(0, matrix.rows, _ROWS_AT_A_TIME):
            yield matrix.read(first, min(_ROWS_AT_A_TIME, matrix.rows - first)).float()
