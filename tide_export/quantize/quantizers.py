"""Quantise a model's matrices, one at a time: rounded, or with `gptq`.

rtn      round to nearest, blocks of 32 with a zero point
gptq     the least error in the products with the activations of a text, which later columns correct (Frantar et al. 2023)
gptq_mixed  gptq, and 8 bits for the matrices whose rounding changes the model's output most, an eighth of the weights

The head and the embedding are in 8 bits: look-ups need few bytes of the embedding, and the head's rounding changes the token
(`tide_export.quantize.head_bits` measures how much).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate
from transformers.pytorch_utils import Conv1D

from tide_export.model.looped_models import GATE
from tide_export.quantize.gptq import gptq, visit_inputs
from tide_export.quantize.sensitivity import divergences, most_sensitive
from tide_export.weights.deferred_weight import LowBits
from tide_export.weights.quantized_weight import QuantizedWeight

_ROUNDED_AT_A_TIME = 1 << 22  # numbers
BLOCK_SIZE = 32  # wider blocks give other bits when more tokens share a launch


@dataclass(frozen=True)
class Matrix:
    """A parameter of ``module``, ``bits`` are the wanted ones; or the matrices of its experts one below the other."""

    name: str
    module: nn.Module
    bits: int

    @property
    def parameter(self) -> nn.Parameter:
        return self.module.get_parameter(self.name.rpartition(".")[2])

    @property
    def values(self) -> torch.Tensor:
        """The matrix [N, K], in the model's memory."""
        weight = self.parameter.detach()
        return weight.T if self.transposed else weight.flatten(0, -2)

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input features [N, K]."""
        *rows, columns = self.parameter.shape
        return (columns, rows[0]) if self.transposed else (math.prod(rows), columns)

    @property
    def fits(self) -> bool:
        """Whether blocks divide its input features."""
        return self.shape[1] % BLOCK_SIZE == 0

    @property
    def transposed(self) -> bool:
        """Whether the parameter is [K, N]."""
        return isinstance(self.module, Conv1D)

    @property
    def key(self) -> int:
        """Tied matrices, which are one parameter, have the same one."""
        return id(self.parameter)


def quantize_for_text(
    model: PreTrainedModel,
    quantizer: str,
    stored: Mapping[str, LowBits],
    tokens: torch.Tensor,
    loops: int,
    advance: Callable[[int, int], None] | None = None,
) -> dict[str, QuantizedWeight]:
    """Low-bit weights by parameter name, which are also dequantised into ``model``: what a quantizer that `reads_text` makes.

    gptq takes the matrices in the order in which the model reaches them, each with inputs of those before it; gptq_mixed rounds
    the most sensitive ones to 8 bits first. Embedding, head and matrices that the text does not reach are left out.

    Args:
        stored: low-bit weights of the source. Those of 4 bits are left out, too: rounding them again would add its error.
        tokens: [B, T] ids of a text.
        loops: how many times the layers run.
        advance: called with the number of matrices done, and of all.
    """
    fitting = [m for m in matrices_of(model, 4) if m.bits == 4 and m.fits]
    fitting = [m for m in fitting if not is_experts(m.module)]  # the text reaches each of those by some of its tokens
    fitting = [m for m in fitting if m.name not in stored or stored[m.name].bits != 4]
    distinct = {matrix.key: matrix for matrix in reversed(fitting)}
    named = {matrix.name: matrix for matrix in distinct.values()}
    done: dict[str, QuantizedWeight] = {}

    def put(matrix: Matrix, weight: QuantizedWeight) -> None:
        matrix.values.copy_(torch.from_numpy(weight.dequantized()))
        done[matrix.name] = weight
        if advance is not None:
            advance(len(done), len(distinct))

    if quantizer == "gptq_mixed":
        modules, changes = {m.name: m.module for m in named.values()}, {m.name: _change(m) for m in named.values()}
        costs = divergences(model, modules, changes, tokens[::2])  # half of the text tells them apart
        for name in most_sensitive(costs, {m.name: m.module.weight.numel() for m in named.values()}):
            matrix = named.pop(name)
            put(matrix, round_to_nearest(matrix.values.float().numpy(), 8))

    def quantize(name: str, gram: torch.Tensor) -> None:
        put(named[name], gptq(named[name].values, gram, 4, BLOCK_SIZE))

    visit_inputs(model, {name: matrix.module for name, matrix in named.items()}, tokens, quantize, loops)
    return done


def _change(matrix: Matrix) -> torch.Tensor:
    """What rounding to 4 bits adds to the matrix [N, K]."""
    rounded = round_to_nearest(matrix.values.float().numpy(), 4)
    return torch.from_numpy(rounded.dequantized()).to(matrix.values.dtype) - matrix.values


def dequantize_parameters(model: PreTrainedModel, weights: dict[str, QuantizedWeight]) -> None:
    """Put the dequantised ``weights`` into ``model``, so that eager and compiled model compute with the same matrices."""
    with torch.no_grad():
        for name, weight in weights.items():
            module, _, parameter = name.rpartition(".")
            owner = model.get_submodule(module)
            matrix = torch.from_numpy(weight.dequantized())
            place = owner.get_parameter(parameter)
            place.copy_(matrix.T if isinstance(owner, Conv1D) else matrix.view(place.shape))


def token_tables(model: PreTrainedModel) -> list[nn.Module]:
    """What is looked up by token ids: the embedding, and a table of inputs for every layer where there is one."""
    tables = [model.get_input_embeddings()]
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0):
        tables.append(model.get_per_layer_input_embeddings())
    return tables


def matrices_of(model: PreTrainedModel, bits: int) -> Iterator[Matrix]:
    """The matrices of linear layers in ``bits``, and those of embedding and head in 8; with 4 bits those of experts too."""
    outer = {id(module) for module in (*token_tables(model), model.get_output_embeddings())}
    for name, module in model.named_modules():
        if name.endswith(GATE):  # a single row, which decides where tokens stop
            continue
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D) and (
            not isinstance(module, nn.Embedding) or id(module) in outer
        ):
            yield Matrix(f"{name}.weight", module, 8 if id(module) in outer else bits)
        elif bits == 4 and is_experts(module):
            yield from (Matrix(f"{name}.{part}", module, bits) for part in ("gate_up_proj", "down_proj"))


def integer_matrices(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers that become products of integers, by the name of their matrix."""
    return {matrix.name: matrix.module for matrix in matrices_of(model, 8) if not isinstance(matrix.module, nn.Embedding)}


def is_experts(module: nn.Module) -> bool:
    """Whether it holds matrices of experts that ONNX Runtime's QMoE takes: gated by SiLU, without biases, in whole blocks."""
    one: Any = module
    if not getattr(module, "has_gate", False) or one.is_transposed or one.has_bias or one.has_post_expert_norm:
        return False
    gated_by_silu = one._apply_gate.__func__ is _default_apply_gate and isinstance(one.act_fn, nn.SiLU | SiLUActivation)
    whole = all(weight.shape[-1] % BLOCK_SIZE == 0 for weight in (one.gate_up_proj, one.down_proj))
    return gated_by_silu and one.is_concatenated and whole


def round_to_nearest(matrix: NDArray[np.float32], bits: int) -> QuantizedWeight:
    """``matrix`` [N, K] as ONNX Runtime rounds it (MlasQuantizeBlockwise in onnxruntime/core/mlas/lib/q4_dq.cpp), to the bit and
    in a third of the time, without copies of the matrix."""
    rows, columns = matrix.shape
    values, scales = np.empty((rows, columns), np.uint8), np.empty((rows, columns // BLOCK_SIZE), np.float32)
    zeros = np.empty(scales.shape, np.uint8) if bits == 4 else None
    step = max(1, _ROUNDED_AT_A_TIME // columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        blocks = matrix[part].reshape(-1, columns // BLOCK_SIZE, BLOCK_SIZE)
        scale, zero = _scales(blocks, bits)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
        scaled = _rounded(blocks * inverse[..., None] + zero[..., None])
        values[part] = np.clip(scaled, 0, (1 << bits) - 1, out=scaled).reshape(-1, columns)
        scales[part] = scale
        if zeros is not None:
            zeros[part] = zero
    return QuantizedWeight(bits, values, scales, zeros, origin=f"int{bits} rtn")


def _scales(blocks: NDArray[np.float32], bits: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and zero points [N, blocks]. 8 bits: the largest magnitude is -128; 4 bits: the extremes and 0 are in the range."""
    low = blocks.min(-1)
    high = blocks.max(-1)
    if bits == 8:
        scale = np.where(np.abs(high) > np.abs(low), high, low) / np.float32(-128)
        return scale, np.full_like(scale, 128)
    low = np.minimum(low, 0)
    high = np.maximum(high, 0)
    scale = (high - low) / np.float32(15)
    return scale, np.clip(_rounded(np.divide(-low, scale, out=np.zeros_like(scale), where=scale != 0)), 0, 15)


def _rounded(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Half away from zero, as C's roundf; the summand is the largest number below a half."""
    return np.trunc(numbers + np.copysign(np.nextafter(np.float32(0.5), np.float32(0)), numbers))
