"""A graph with one low-bit matrix product of each kind of a target, on which the runtime measures how kernels round.

Its products are the model's own, their weights by reference into the shared weight file. Inputs are ``x_K`` [tokens, K] for
every K, outputs ``y_i`` [tokens, N]. Of wide products only the first output features are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from tide_export.bundle_writer import ONNX_FOLDER
from tide_export.graphs.cut import CutGraph

_OPERATOR = "MatMulNBits"
_FEATURES, _TILE = 512, 128  # output features; the remainder of N by the widest tile is kept, as it has kernels of its own
_WEIGHT, _SCALES, _GROUP_INDEX, _BIAS = 1, 2, 4, 5  # inputs of MatMulNBits; 3: zero points


class Kind(NamedTuple):
    """What a product's kernel depends on. ``n``: as kept; ``weights``: data types of the weight inputs, None for absent ones."""

    k: int
    n: int
    bits: int
    block_size: int
    accuracy_level: int
    weights: tuple[ir.DataType | None, ...]


def write_products(graphs: Iterable[CutGraph], target: str, directory: Path) -> str | None:
    """Write the graph of the products in ``graphs``, whose weights are external by now.

    Returns its path in the bundle; None without low-bit products.
    """
    model = products_graph(graph.model for graph in graphs)
    if model is None:
        return None
    file = f"{ONNX_FOLDER}/{target}.products.onnx"
    ir.save(model, directory / file)
    return file


def products_graph(models: Iterable[ir.Model]) -> ir.Model | None:
    """The graph of one product of each kind in ``models``; None without low-bit products."""
    kinds: dict[Kind, ir.Node] = {}
    versions: dict[str, int] = {}
    ir_version = 0
    for model in models:
        for node in model.graph.all_nodes():
            if node.op_type == _OPERATOR and all(_constant(value) is not None for value in node.inputs[1:] if value is not None):
                kinds.setdefault(_kind(node), node)
                versions = model.graph.opset_imports
                ir_version = model.ir_version
    if not kinds:
        return None
    inputs: dict[int, ir.Value] = {}
    weights = list[ir.Value]()
    nodes = list[ir.Node]()
    for number, (kind, node) in enumerate(kinds.items()):
        dtype = kind.weights[_SCALES - 1]  # which the activations share
        if kind.k not in inputs:
            inputs[kind.k] = ir.val(f"x_{kind.k}", dtype=dtype, shape=["tokens", kind.k])
        parts = [_first_features(node, position, kind, f"product_{number}.{position}") for position in range(1, len(node.inputs))]
        weights += [part for part in parts if part is not None]
        output = ir.val(f"y_{number}", dtype=dtype, shape=["tokens", kind.n])
        attributes = {name: attribute.value for name, attribute in node.attributes.items()} | {"N": kind.n}
        nodes.append(ir.node(_OPERATOR, [inputs[kind.k], *parts], attributes, domain=node.domain, outputs=[output]))
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph(
        list(inputs.values()), outputs, nodes=nodes, initializers=weights, opset_imports=dict(versions), name="products"
    )
    return ir.Model(graph, ir_version=ir_version)


def _kind(node: ir.Node) -> Kind:
    features = _integer(node, "N")
    kept = min(features, _FEATURES + features % _TILE)
    dtypes = tuple(None if value is None else _constant(value).dtype for value in node.inputs[1:])
    bits, block_size, accuracy_level = (_integer(node, name) for name in ("bits", "block_size", "accuracy_level"))
    return Kind(_integer(node, "K"), kept, bits, block_size, accuracy_level, dtypes)


def _integer(node: ir.Node, name: str) -> int:
    defaults = {"bits": 4, "accuracy_level": 0}
    return int(node.attributes[name].value) if name in node.attributes else defaults[name]


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of an initializer, also of one that is reshaped, as a weight shared with the embedding is."""
    producer = value.producer()
    if producer is not None and producer.op_type == "Reshape":
        return producer.inputs[0].const_value
    return value.const_value


def _first_features(node: ir.Node, position: int, kind: Kind, name: str) -> ir.Value | None:
    """Weight input ``position`` of a product for its first ``kind.n`` output features; None where it is absent."""
    if node.inputs[position] is None:
        return None
    tensor = _constant(node.inputs[position])
    total = _integer(node, "N")
    if position == _GROUP_INDEX:  # by input feature
        shape = list(tensor.shape.numpy())
        share = tensor.nbytes
    else:
        blocks = -(-kind.k // kind.block_size)
        share = tensor.nbytes * kind.n // total
        rest = {_WEIGHT: [blocks, kind.block_size * kind.bits // 8], _BIAS: []}.get(position, [tensor.size // total])
        shape = [kind.n, *rest]
    if isinstance(tensor, ir.ExternalTensor):
        part: ir.TensorProtocol = ir.ExternalTensor(
            tensor.location, tensor.offset, share, tensor.dtype, shape=ir.Shape(shape), name=name, base_dir=tensor.base_dir
        )
    else:
        part = ir.Tensor(np.ascontiguousarray(tensor.numpy().reshape(-1)[: int(np.prod(shape))].reshape(shape)), name=name)
    return ir.val(name, const_value=part)
