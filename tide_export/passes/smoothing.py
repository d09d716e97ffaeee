"""Divide the inputs of integer products by their smoothing scales (`tide_export.quantize.smoothing`), at no cost where possible.

``tide::Smooth(x, factors)`` is x · factors, with the reciprocals [K] of the scales. `fold_smoothing` takes the factors into the
weight of the norm that makes x, or into the scales of the integer product that is a factor of x, as that of up is in a gated MLP;
else it leaves a Mul.
"""

from __future__ import annotations

import hashlib

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from numpy.typing import NDArray

from tide_export.model.traced_attention import DOMAIN
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import add_initializer, array_initializer, insert_before, is_weight, new_value, produced_by
from tide_export.weights.weight_file import Folded

SMOOTH = "Smooth"
_NORM_WEIGHTS = {"RMSNormalization": (1,), "LayerNormalization": (1, 2)}  # operands that scale with the output
_SCALES = 2  # operand of a `QuantizedMatMul`


def smoothed(graph: ir.Graph, node: ir.Node, scales: NDArray[np.float32]) -> ir.Value:
    """The input of the product ``node`` divided by ``scales``, the same value for all products of the input."""
    source = node.inputs[0]
    assert source is not None
    if (scales == 1).all():
        return source
    factors = factors_of(graph, scales)
    for use in source.uses():
        if use.node.op_type == SMOOTH and use.node.inputs[1] is factors:
            return use.node.outputs[0]
    output = new_value(f"{source.name}.{factors.name}", source, source.shape)
    insert_before(graph, node, ir.node(SMOOTH, [source, factors], domain=DOMAIN, outputs=[output]))
    return output


def factors_of(graph: ir.Graph, scales: NDArray[np.float32]) -> ir.Value:
    """The reciprocals of ``scales`` as an initializer, the same for equal ones."""
    factors = (1 / scales).astype(np.float32)
    return array_initializer(graph, f"smooth_{hashlib.sha256(factors.tobytes()).hexdigest()[:12]}", factors)


def fold_smoothing(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("fold_smoothing")
    graph = model.graph
    for node in [n for n in graph if n.op_type == SMOOTH]:
        source, factors = node.inputs
        if _is_only_use(node) and _fold(graph, source, factors):
            ir.convenience.replace_all_uses_with(node.outputs[0], source)
            report.applied += 1
        else:
            output = new_value(f"{node.outputs[0].name}.product", source, source.shape)
            insert_before(graph, node, ir.node("Mul", [source, factors], outputs=[output]))
            ir.convenience.replace_all_uses_with(node.outputs[0], output)
            report.skip(output.name, "no norm and no integer product alone makes the input")
    common.RemoveUnusedNodesPass()(model)
    return report


def _is_only_use(node: ir.Node) -> bool:
    """Whether nothing else reads the input of the `SMOOTH` ``node``."""
    source = node.inputs[0]
    return len(source.uses()) == 1 and not source.is_graph_output()


def _fold(graph: ir.Graph, value: ir.Value, factors: ir.Value) -> bool:
    """Multiply ``value``, which has one consumer, by ``factors`` where it is made; False: that is not possible."""
    node = value.producer()
    if node is None:
        return False
    if node.op_type in _NORM_WEIGHTS:
        places = [place for place in _NORM_WEIGHTS[node.op_type] if place < len(node.inputs) and node.inputs[place] is not None]
        for place in places if all(is_weight(node.inputs[place]) for place in places) else ():
            _scale(graph, node, place, factors)
        return all(is_weight(node.inputs[place]) for place in places)
    if node.op_type == "Mul":
        return any(_fold_into_product(graph, operand, factors) for operand in node.inputs)
    return False


def _fold_into_product(graph: ir.Graph, value: ir.Value | None, factors: ir.Value) -> bool:
    if value is None or len(value.uses()) != 1 or value.is_graph_output():
        return False
    if (added := produced_by(value, "Add")) is not None:
        bias = next((place for place, operand in enumerate(added.inputs) if is_weight(operand)), None)
        if bias is None or not _fold_into_product(graph, added.inputs[1 - bias], factors):
            return False
        _scale(graph, added, bias, factors)
        return True
    product = produced_by(value, "QuantizedMatMul")
    if product is None or "integers" not in product.attributes:
        return False
    _scale(graph, product, _SCALES, factors)
    return True


def _scale(graph: ir.Graph, node: ir.Node, place: int, factors: ir.Value) -> None:
    """Multiply the weight [N] or [N, 1] at an operand of ``node`` by ``factors`` [N]."""
    weight = node.inputs[place]
    assert weight is not None and weight.const_value is not None and factors.const_value is not None
    shape = [int(size) for size in weight.const_value.shape]
    tensor = Folded(
        [weight.const_value, factors.const_value],
        "smoothed",
        shape,
        lambda arrays: arrays[0] * arrays[1].reshape(arrays[0].shape),
    )
    node.replace_input_with(place, add_initializer(graph, f"{weight.name}.{factors.name}", tensor))
