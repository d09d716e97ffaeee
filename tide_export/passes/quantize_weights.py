"""Replace products with a low-bit weight by ``tide::QuantizedMatMul``, and look-ups in a low-bit embedding.

``tide::QuantizedMatMul(x, values, scales, zero_points, offsets)``: x [B, S, K] times the transposed matrix [N, K] of a
`QuantizedWeight`; ``zero_points`` and ``offsets`` may be absent. Attributes K, N, bits, block_size. Later passes pack projections
and lower it to what a target has (`lower_quantized_matmul`). ONNX Runtime's GatherBlockQuantized reads the embedding; a tied head
reads the same bytes. The first pass of a target: parameters lose their names when constants are folded.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.passes.attention_gqa import MS_DOMAIN
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import add_initializer, insert_before, is_weight, new_value, produced_by
from tide_export.quantization.quantized_weight import QuantizedWeight
from tide_export.traced_attention import DOMAIN

QUANTIZED_MATMUL = "QuantizedMatMul"


def quantize_weights(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("quantize_weights")
    graph = model.graph
    for node in list(graph) if context.quantized else ():
        if node.op_type == "MatMul":
            _quantize_product(graph, node, context, report)
        elif node.op_type == "Gather":
            _quantize_embedding(graph, node, context, report)
    if report.applied:
        model.opset_imports[DOMAIN] = model.opset_imports[MS_DOMAIN] = 1
        common.RemoveUnusedNodesPass()(model)
    return report


def _quantize_product(graph: ir.Graph, node: ir.Node, context: LoweringContext, report: PassReport) -> None:
    factor = node.inputs[1]
    transpose = produced_by(factor, "Transpose")
    parameter = transpose.inputs[0] if transpose is not None else factor
    weight = context.quantized_weight(parameter.name) if is_weight(parameter) else None
    if weight is None:
        return
    stored = tuple(int(size) for size in parameter.const_value.shape)
    if (stored if transpose is not None else stored[::-1]) != weight.shape:
        report.skip(node.outputs[0].name, "the product takes the weight in another shape than it is stored in")
        return
    output = node.outputs[0]
    features, columns = weight.shape
    name, product = output.name, new_value(f"{output.name}.quantized", output, output.shape)
    quantized = ir.node(
        QUANTIZED_MATMUL,
        [node.inputs[0], *_weight_values(graph, parameter.name, weight)],
        attributes={"K": columns, "N": features, "bits": weight.bits, "block_size": weight.block_size},
        domain=DOMAIN,
        outputs=[product],
    )
    insert_before(graph, node, quantized)
    ir.convenience.replace_all_uses_with(output, product, replace_graph_outputs=True)
    output.name, product.name = f"{name}.dense", name
    report.applied += 1


def _weight_values(graph: ir.Graph, name: str | None, weight: QuantizedWeight) -> list[ir.Value | None]:
    """Values, scales, zero points and offsets as initializers."""
    rows, blocks = weight.scales.shape
    packed = ir.Shape([rows, blocks, weight.block_size * weight.bits // 8])
    values = ir.LazyTensor(lambda: ir.tensor(weight.packed_values()), dtype=ir.DataType.UINT8, shape=packed)
    zeros = weight.packed_zero_points()
    return [
        add_initializer(graph, f"{name}.values", values),
        add_initializer(graph, f"{name}.scales", ir.tensor(weight.scales)),
        add_initializer(graph, f"{name}.zero_points", ir.tensor(zeros)) if zeros is not None else None,
        add_initializer(graph, f"{name}.offsets", ir.tensor(weight.offsets)) if weight.offsets is not None else None,
    ]


def _quantize_embedding(graph: ir.Graph, node: ir.Node, context: LoweringContext, report: PassReport) -> None:
    table, axis = node.inputs[0], node.attributes["axis"].value if "axis" in node.attributes else 0
    weight = context.quantized_weight(table.name) if is_weight(table) and axis == 0 else None
    if weight is None:
        return
    output = node.outputs[0]
    if weight.offsets is not None:
        report.skip(output.name, "the embedding's blocks have a minimum, which the look-up does not take")
        return
    rows, columns = weight.shape
    flat = ir.Shape([rows, columns * weight.bits // 8])
    values = ir.LazyTensor(lambda: ir.tensor(weight.packed_values().reshape(rows, -1)), dtype=ir.DataType.UINT8, shape=flat)
    _, scales, zeros, _ = _weight_values(graph, table.name, weight)
    looked_up = ir.node(
        "GatherBlockQuantized",
        [add_initializer(graph, f"{table.name}.rows", values), node.inputs[1], scales, *([zeros] if zeros is not None else [])],
        attributes={"bits": weight.bits, "block_size": weight.block_size, "gather_axis": 0, "quantize_axis": 1},
        domain=MS_DOMAIN,
        outputs=[new_value(f"{output.name}.quantized", output, output.shape)],
    )
    insert_before(graph, node, looked_up)
    ir.convenience.replace_all_uses_with(output, looked_up.outputs[0], replace_graph_outputs=True)
    report.applied += 1
