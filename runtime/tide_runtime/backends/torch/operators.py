"""ONNX operators as functions of tensors (https://onnx.ai/onnx/operators), except attention and products with low-bit weights.

A function gets a node's operands in order, None for those left out. Operands in ``host`` are sizes and axes, which lie in host
memory: reading them from a device would wait for it, and is forbidden while a CUDA graph is captured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from torch import Tensor

from tide_runtime.backends.torch.graph_file import DTYPES

Function = Callable[..., Any]  # tensors → a tensor, or a tuple of them for an operator with several outputs
Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class Operator:
    """``make``: the function of a node with these attributes. ``host``: see above."""

    make: Callable[[Attributes], Function]
    host: frozenset[int] = frozenset()


def _plain(function: Function) -> Operator:
    """An operator without attributes."""
    return Operator(lambda attributes: function)


def _reads_host(make: Callable[[Attributes], Function], *host: int) -> Operator:
    return Operator(make, frozenset(host))


def _ints(operand: Tensor) -> list[int]:
    return [int(number) for number in operand.reshape(-1).tolist()]


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc")


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return torch.clamp(x, low, high)


def _cast(attributes: Attributes) -> Function:
    dtype = DTYPES[attributes["to"]]
    return lambda x: x.to(dtype)


def _reshape(attributes: Attributes) -> Function:
    keeps_zeros = bool(attributes.get("allowzero", 0))

    def reshape(x: Tensor, shape: Tensor) -> Tensor:
        sizes = _ints(shape)
        return x.reshape(sizes if keeps_zeros else [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)])

    return reshape


def _transpose(attributes: Attributes) -> Function:
    return lambda x: x.permute(attributes.get("perm") or list(range(x.dim()))[::-1])


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    numbers = _ints(axes)
    for axis in sorted(axis % (x.dim() + len(numbers)) for axis in numbers):
        x = x.unsqueeze(axis)
    return x


def _squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze(_ints(axes)) if axes is not None else x.squeeze()  # type: ignore[arg-type]


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(_ints(shape))))


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    first, last = _ints(starts), _ints(ends)
    along = _ints(axes) if axes is not None else list(range(len(first)))
    strides = _ints(steps) if steps is not None else [1] * len(first)
    index = [slice(None)] * x.dim()
    for axis, start, end, step in zip(along, first, last, strides, strict=True):
        index[axis % x.dim()] = slice(start, end, step)
    return x[tuple(index)]


def _split(attributes: Attributes) -> Function:
    axis = attributes.get("axis", 0)
    parts = int(attributes.get("num_outputs", 1))

    def split(x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
        return x.split(_ints(sizes) if sizes is not None else -(-x.shape[axis] // parts), axis)

    return split


def _gather(attributes: Attributes) -> Function:
    before = (slice(None),) * attributes.get("axis", 0)
    return lambda x, indices: x[(*before, indices)]


def _gather_nd(x: Tensor, indices: Tensor) -> Tensor:
    return x[indices.unbind(-1)]


def _scatter_elements(attributes: Attributes) -> Function:
    axis, how = attributes.get("axis", 0), attributes.get("reduction", "none")
    if how == "none":
        return lambda x, indices, updates: x.scatter(axis, indices, updates)
    name = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[how]
    return lambda x, indices, updates: x.scatter_reduce(axis, indices, updates, name)


def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return x.index_put(indices.unbind(-1), updates)


def _top_k(attributes: Attributes) -> Function:
    axis = attributes.get("axis", -1)
    largest = bool(attributes.get("largest", 1))
    return lambda x, count: tuple(torch.topk(x, _ints(count)[0], axis, largest))


def _reduction(function: Function) -> Operator:
    """``function(x, axes, keepdim)``."""

    def make(attributes: Attributes) -> Function:
        keeps = bool(attributes.get("keepdims", 1))
        return lambda x, axes=None: function(x, _ints(axes) if axes is not None else list(range(x.dim())), keeps)

    return _reads_host(make, 1)


def _arg_max(attributes: Attributes) -> Function:
    axis = attributes.get("axis", 0)
    keeps = bool(attributes.get("keepdims", 1))
    return lambda x: x.argmax(axis, keeps)


def _softmax(attributes: Attributes) -> Function:
    return lambda x: torch.softmax(x, attributes.get("axis", -1))


def _shape(attributes: Attributes) -> Function:
    start, end = attributes.get("start", 0), attributes.get("end")
    return lambda x: torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


def _range(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


def _constant_of_shape(attributes: Attributes) -> Function:
    given = attributes.get("value")
    number = torch.zeros(1) if given is None else torch.from_numpy(onnx.numpy_helper.to_array(given).copy())
    return lambda shape: number.expand(_ints(shape) or [1]).clone()


def _pad(x: Tensor, pads: Tensor, fill: Tensor | None = None, axes: Tensor | None = None) -> Tensor:
    numbers = _ints(pads)
    along = _ints(axes) if axes is not None else list(range(x.dim()))
    around = [0] * 2 * x.dim()  # of the last axis first
    for i, axis in enumerate(along):
        from_last = 2 * (x.dim() - 1 - axis % x.dim())
        around[from_last], around[from_last + 1] = numbers[i], numbers[i + len(along)]
    return F.pad(x, around, value=0 if fill is None else fill.item())


def _cum_sum(attributes: Attributes) -> Function:
    return lambda x, axis: torch.cumsum(x, _ints(axis)[0])


def _mod(attributes: Attributes) -> Function:
    return torch.fmod if attributes.get("fmod") else torch.remainder


def _gelu(attributes: Attributes) -> Function:
    return partial(F.gelu, approximate=attributes.get("approximate", "none"))


def _rms_norm(attributes: Attributes) -> Function:
    epsilon = attributes.get("epsilon", 1e-5)
    return lambda x, weight: F.rms_norm(x, weight.shape, weight, epsilon)


def _layer_norm(attributes: Attributes) -> Function:
    epsilon = attributes.get("epsilon", 1e-5)
    return lambda x, weight, bias=None: F.layer_norm(x, weight.shape, weight, bias, epsilon)


def _skip_norm(attributes: Attributes) -> Function:
    epsilon = attributes["epsilon"]

    def norm(x: Tensor, skip: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        total = x + skip
        return F.rms_norm(total, weight.shape, weight, epsilon), None, None, total

    return norm


def _fused_matmul(attributes: Attributes) -> Function:
    alpha, turns_a, turns_b = (attributes.get(name, default) for name, default in (("alpha", 1.0), ("transA", 0), ("transB", 0)))

    def product(a: Tensor, b: Tensor) -> Tensor:
        made = (a.mT if turns_a else a) @ (b.mT if turns_b else b)
        return made if alpha == 1.0 else made * alpha

    return product


def _gemm(attributes: Attributes) -> Function:
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    turns_a, turns_b = attributes.get("transA", 0), attributes.get("transB", 0)

    def product(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        a, b = a.mT if turns_a else a, b.mT if turns_b else b
        return a @ b * alpha if c is None else torch.addmm(c, a, b, alpha=alpha, beta=beta)

    return product


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition, x, y)


def _concat(attributes: Attributes) -> Function:
    return lambda *parts: torch.cat(parts, attributes["axis"])


def _most(*operands: Tensor) -> Tensor:
    return reduce(torch.maximum, operands)


def _least(*operands: Tensor) -> Tensor:
    return reduce(torch.minimum, operands)


OPERATORS: dict[str, Operator] = {
    "Abs": _plain(torch.abs),
    "Add": _plain(operator.add),
    "And": _plain(torch.logical_and),
    "ArgMax": Operator(_arg_max),
    "Cast": Operator(_cast),
    "Clip": _plain(_clip),
    "Concat": Operator(_concat),
    "ConstantOfShape": _reads_host(_constant_of_shape, 0),
    "Cos": _plain(torch.cos),
    "CumSum": _reads_host(_cum_sum, 1),
    "Div": _plain(_divide),
    "Equal": _plain(torch.eq),
    "Erf": _plain(torch.erf),
    "Exp": _plain(torch.exp),
    "Expand": _reads_host(lambda attributes: _expand, 1),
    "Floor": _plain(torch.floor),
    "Gather": Operator(_gather),
    "GatherElements": Operator(lambda attributes: lambda x, indices: x.gather(attributes.get("axis", 0), indices)),
    "GatherND": _plain(_gather_nd),
    "Gelu": Operator(_gelu),
    "Gemm": Operator(_gemm),
    "Greater": _plain(torch.gt),
    "GreaterOrEqual": _plain(torch.ge),
    "Identity": _plain(lambda x: x),
    "LayerNormalization": Operator(_layer_norm),
    "Less": _plain(torch.lt),
    "LessOrEqual": _plain(torch.le),
    "Log": _plain(torch.log),
    "MatMul": _plain(torch.matmul),
    "Max": _plain(_most),
    "Min": _plain(_least),
    "Mod": Operator(_mod),
    "Mul": _plain(operator.mul),
    "Neg": _plain(operator.neg),
    "Not": _plain(torch.logical_not),
    "Or": _plain(torch.logical_or),
    "Pad": _reads_host(lambda attributes: _pad, 1, 2, 3),
    "Pow": _plain(torch.pow),
    "RMSNormalization": Operator(_rms_norm),
    "Range": _reads_host(lambda attributes: _range, 0, 1, 2),
    "Reciprocal": _plain(torch.reciprocal),
    "ReduceMax": _reduction(torch.amax),
    "ReduceMean": _reduction(torch.mean),
    "ReduceSum": _reduction(torch.sum),
    "Relu": _plain(torch.relu),
    "Reshape": _reads_host(_reshape, 1),
    "ScatterElements": Operator(_scatter_elements),
    "ScatterND": _plain(_scatter_nd),
    "Shape": Operator(_shape),
    "Sigmoid": _plain(torch.sigmoid),
    "Sin": _plain(torch.sin),
    "Slice": _reads_host(lambda attributes: _slice, 1, 2, 3, 4),
    "Softmax": Operator(_softmax),
    "Softplus": _plain(F.softplus),
    "Split": _reads_host(_split, 1),
    "Sqrt": _plain(torch.sqrt),
    "Squeeze": _reads_host(lambda attributes: _squeeze, 1),
    "Sub": _plain(operator.sub),
    "Tanh": _plain(torch.tanh),
    "TopK": _reads_host(_top_k, 1),
    "Transpose": Operator(_transpose),
    "Unsqueeze": _reads_host(lambda attributes: _unsqueeze, 1),
    "Where": _plain(_where),
    "com.microsoft::FusedMatMul": Operator(_fused_matmul),
    "com.microsoft::SkipSimplifiedLayerNormalization": Operator(_skip_norm),
}
