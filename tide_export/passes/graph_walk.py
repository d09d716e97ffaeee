"""Helpers to match and edit an ONNX graph: the producer of a value, its constant, its shape; new values and nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir


def produced_by(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that makes ``value`` if its type is one of ``op_types``, else None."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in op_types else None


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The array of a constant or initializer, else None."""
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()


def is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def scalar(value: ir.Value | None) -> float | None:
    """The number of a one-element constant, else None."""
    array = constant(value) if value is not None and value.const_value is not None and value.const_value.size == 1 else None
    return None if array is None else float(array.reshape(()))


def dims(value: ir.Value) -> list[int | str | None] | None:
    """The value's shape with symbolic dimensions by name, or None if it is unknown."""
    if value.shape is None:
        return None
    return [d if isinstance(d, int) else d.value for d in value.shape]


def rename_dims(values: Iterable[ir.Value], names: Mapping[Any, int | str]) -> None:
    """Replace dimensions by ``names``: ONNX Runtime lets values whose dimensions have the same names share memory."""
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([names.get(dim, dim) for dim in value.shape])


def commuted(node: ir.Node, accept: Callable[[ir.Value | None], bool]) -> tuple[ir.Value | None, ir.Value | None] | None:
    """The operands of a commutative node, the one that ``accept`` returns True for first; None if it does for neither."""
    first, second = node.inputs
    if accept(first):
        return first, second
    if accept(second):
        return second, first
    return None


def new_value(name: str, like: ir.Value | None = None, shape: ir.Shape | None = None) -> ir.Value:
    return ir.Value(name=name, type=like.type if like is not None else None, shape=shape)


def add_initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Register ``tensor`` as an initializer under ``name``; returns the existing one if the name is taken."""
    if name in graph.initializers:
        return graph.initializers[name]
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


def array_initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    return add_initializer(graph, name, ir.tensor(array, name=name))


def as_type_of(graph: ir.Graph, like: ir.Value, weight: ir.Value) -> ir.Value:
    """The initializer ``weight`` in the data type of ``like``, converted when it is read."""
    if like.dtype is None or like.dtype == weight.dtype:
        return weight
    tensor = weight.const_value
    assert tensor is not None
    dtype = like.dtype

    def cast() -> ir.TensorProtocol:
        return ir.Tensor(tensor.numpy().astype(dtype.numpy()), dtype=dtype)

    lazy = ir.LazyTensor(cast, dtype=dtype, shape=ir.Shape(tensor.shape))
    return add_initializer(graph, f"{weight.name}.{dtype.name.lower()}", lazy)


def splice(
    model: ir.Model, piece: ir.Model, prefix: str, given: Sequence[ir.Value], before: ir.Node | None = None
) -> list[ir.Value]:
    """Insert a copy of ``piece`` ``before`` a node of ``model``, or at its end; returns the values of its outputs.

    Args:
        prefix: is put before all its names.
        given: what takes the place of each of its inputs.
    """
    graph = model.graph
    copy = piece.clone()
    for value, source in zip(list(copy.graph.inputs), given, strict=True):
        ir.convenience.replace_all_uses_with(value, source)
    outputs = list(copy.graph.outputs)
    copy.graph.outputs.clear()
    for value in list(copy.graph.initializers.values()):
        copy.graph.initializers.pop(value.name)
        value.name = f"{prefix}.{value.name}"
        graph.register_initializer(value)
    nodes = list(copy.graph)
    copy.graph.remove(nodes)
    for node in nodes:
        node.name = f"{prefix}.{node.name}" if node.name else None
        for value in node.outputs:
            value.name = f"{prefix}.{value.name}" if value.name else value.name
    if before is None:
        graph.extend(nodes)
    else:
        graph.insert_before(before, nodes)
    for domain, version in copy.opset_imports.items():
        model.opset_imports.setdefault(domain, version)
    return outputs


def insert_before(graph: ir.Graph, anchor: ir.Node, *nodes: ir.Node) -> None:
    graph.insert_before(anchor, nodes)


def take_place(new: ir.Value, old: ir.Value) -> None:
    """Let ``new`` be read in the place of ``old``; where that is an output of the graph, ``new`` is one, under its name."""
    if old.is_graph_output():
        old.name, new.name = new.name, old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def depends_only_on(value: ir.Value, allowed: ir.Value) -> bool:
    """True when ``value`` is computed from ``allowed`` and constants alone."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        if current is allowed or id(current) in seen or current.const_value is not None:
            continue
        seen.add(id(current))
        node = current.producer()
        if node is None:
            return False
        stack.extend(v for v in node.inputs if v is not None)
    return True


def sinks_of(attention: ir.Node) -> ir.Value | None:
    """The sinks [N] of a ``tide::Attention``, or None."""
    return attention.inputs[6] if len(attention.inputs) > 6 else None
