"""Pack the projections of query, key and value into one MatMul, whose product GroupQueryAttention reads packed, and other
low-bit products of one input, such as gate and up of the MLP, into one that is split.

One large product uses all cores with one dispatch instead of three. The packed weight is computed when the file is written.
In full precision gate and up stay apart: the Split after the product costs more than one product saves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.fold_weights import concatenated
from tide_export.passes.graph_walk import add_initializer, array_initializer, insert_before, is_weight, new_value, produced_by
from tide_export.passes.quantize_weights import QUANTIZED_MATMUL

_FORM = ("K", "bits", "block_size", "integers")
_WEIGHT_INPUTS = ("", "weight", "scales", "zero_points", "offsets")


@dataclass(frozen=True)
class _Projection:
    """x · weight (+ bias), whose product has no other consumer."""

    source: ir.Value
    product: ir.Node
    bias: ir.Value | None
    output: ir.Value

    @property
    def width(self) -> int:
        if self.product.op_type == QUANTIZED_MATMUL:  # its output may have no shape: a biased product of torch's has none
            return int(self.product.attributes["N"].value)
        return int(self.output.shape[-1])

    def form(self) -> tuple[object, ...]:
        """Products of one form can be computed as one."""
        given = tuple(value is not None for value in self.product.inputs)
        return self.product.op_type, given, *(self.product.attributes[n].value for n in _FORM if n in self.product.attributes)


def pack_projections(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("pack_projections")
    for node in [n for n in model.graph if n.op_type == "GroupQueryAttention"]:
        _pack_qkv(model.graph, node, report)
    common.RemoveUnusedNodesPass()(model)
    return report


def _pack_qkv(graph: ir.Graph, attention: ir.Node, report: PassReport) -> None:
    parts = [_projection(v) for v in attention.inputs[:3]]
    where = attention.outputs[1].name
    if any(p is None for p in parts):
        report.skip(where, "query, key or value is not a plain projection (normed, sliced or already packed)")
        return
    joined = _join(graph, attention, parts, where)
    if joined is None:
        report.skip(
            where,
            "query, key and value are projected from different inputs, not all with a bias, or with weights of different forms",
        )
        return
    attention.replace_input_with(0, joined)
    attention.replace_input_with(1, None)
    attention.replace_input_with(2, None)
    report.applied += 1


def pack_products(model: ir.Model, context: LoweringContext) -> PassReport:
    """Low-bit products of the same input and form become one product, and a Split of its output."""
    report = PassReport("pack_products")
    graph = model.graph
    groups: dict[object, list[_Projection]] = {}
    for node in [n for n in graph if n.op_type == QUANTIZED_MATMUL]:
        source = node.inputs[0]
        assert source is not None
        part = _Projection(source, node, None, node.outputs[0])
        groups.setdefault((source, part.form()), []).append(part)
    for parts in groups.values():
        if len(parts) > 1 and not any(part.output.is_graph_output() for part in parts):
            _split(graph, parts)
            report.applied += 1
    common.RemoveUnusedNodesPass()(model)
    return report


def _split(graph: ir.Graph, parts: list[_Projection]) -> None:
    """Replace the outputs of ``parts``, which are in the graph's order, by parts of one product's."""
    first = parts[0].product
    joined = _join(graph, first, parts, parts[0].output.name)
    assert joined is not None
    widths = [part.width for part in parts]
    sizes = array_initializer(graph, f"packed.split_{'_'.join(map(str, widths))}", np.array(widths))
    shapes = [ir.Shape([*list(joined.shape)[:-1], width]) for width in widths]
    outputs = [new_value(f"{part.output.name}.part", joined, shape) for part, shape in zip(parts, shapes, strict=True)]
    insert_before(graph, first, ir.node("Split", [joined, sizes], {"axis": -1}, outputs=outputs))
    for part, output in zip(parts, outputs, strict=True):
        ir.convenience.replace_all_uses_with(part.output, output)


def _projection(value: ir.Value | None) -> _Projection | None:
    """``value`` as a projection with one consumer, else None."""
    if value is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    added = produced_by(value, "Add")
    bias = next((v for v in added.inputs if is_weight(v)), None) if added is not None else None
    product_value = next((v for v in added.inputs if v is not bias), None) if added is not None else value
    product = produced_by(product_value, "MatMul", QUANTIZED_MATMUL)
    if product is None or (added is not None and bias is None) or len(product.outputs[0].uses()) != 1:
        return None
    source, weight = product.inputs[:2]
    if source is None or weight is None or weight.const_value is None:
        return None
    if product.op_type == "MatMul" and len(weight.const_value.shape) != 2:
        return None
    return _Projection(source, product, bias, value)


def _join(graph: ir.Graph, anchor: ir.Node, parts: list[_Projection], name: str | None) -> ir.Value | None:
    """One projection with the concatenated weights (and biases) of ``parts``, inserted before ``anchor``."""
    source = parts[0].source
    biased = [p.bias is not None for p in parts]
    if any(p.source is not source for p in parts) or (any(biased) and not all(biased)) or len({p.form() for p in parts}) > 1:
        return None
    width = sum(p.width for p in parts)
    first = parts[0].product
    shape = ir.Shape([*list(source.shape)[:-1], width])
    axis = 1 if first.op_type == "MatMul" else 0
    weights = [
        _joined(graph, [p.product.inputs[i] for p in parts], f"{name}.packed_{_WEIGHT_INPUTS[i]}", axis)
        for i in range(1, len(first.inputs))
    ]
    attributes = {key: attribute.value for key, attribute in first.attributes.items()} | ({"N": width} if axis == 0 else {})
    joined = "+".join(p.product.outputs[0].name or "" for p in parts)  # see `name_products`
    outputs = [new_value(joined, source, shape)]
    product = ir.node(first.op_type, [source, *weights], attributes, domain=first.domain, outputs=outputs)
    insert_before(graph, anchor, product)
    if not all(biased):
        return product.outputs[0]
    bias = add_initializer(graph, f"{name}.packed_bias", concatenated([p.bias.const_value for p in parts], 0))
    total = ir.node("Add", [product.outputs[0], bias], outputs=[new_value(f"{name}.packed_biased", source, shape)])
    insert_before(graph, anchor, total)
    return total.outputs[0]


def _joined(graph: ir.Graph, values: list[ir.Value | None], name: str, axis: int) -> ir.Value | None:
    """The initializers ``values`` joined along ``axis``; None where they are absent."""
    tensors = [value.const_value for value in values if value is not None]
    return add_initializer(graph, name, concatenated(tensors, axis)) if tensors else None
