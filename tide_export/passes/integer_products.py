"""Lower integer products (``tide::QuantizedMatMul`` with the attribute ``integers``) to ONNX Runtime's MatMulIntegerToFloat.

    q = round(x / max |x| · 127) + 128 for each row,   y = max |x| / 127 · scales[n] · Σₖ (q[k] - 128) · w[n, k]

The sum is one of integers: a row's result does not depend on the rows beside it nor on the order of the sum, so no launch is
padded for it. Further rows cost little: ONNX Runtime reads the matrix once for several of them, which MatMulNBits does not.

Processors without VNNI add pairs of products in 16 bits, which 8 bits of both factors overflow. All products therefore read the
step 1/127 and the zero point from the initializers `STEP` and `ZERO_POINT`: the runtime replaces them by those of 7 bits there
(`tide_runtime.backends.onnxruntime.activation_bits`). Products of one input share its rounding.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from tide_runtime.backends.onnxruntime.activation_bits import EIGHT, STEP, ZERO_POINT

from tide_export.passes.attention_gqa import MS_DOMAIN
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import add_initializer, array_initializer, insert_before, new_value
from tide_export.passes.quantize_weights import QUANTIZED_MATMUL
from tide_export.weights.weight_file import Folded


def lower_integer_products(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("integer_products")
    graph = model.graph
    rounded: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    for node in [n for n in graph if n.op_type == QUANTIZED_MATMUL and "integers" in n.attributes]:
        source = node.inputs[0]
        if source not in rounded:
            rounded[source] = _round_rows(graph, node, source)
        _lower(graph, node, *rounded[source])
        report.applied += 1
    if report.applied:
        model.opset_imports[MS_DOMAIN] = 1
        common.RemoveUnusedNodesPass()(model)
    return report


def _round_rows(graph: ir.Graph, before: ir.Node, source: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The rows of ``source`` [B, S, K] in 8 bits, and the largest magnitude [B, S, 1] of each."""
    *outer, _ = source.shape
    magnitude, largest, share = (
        new_value(f"{source.name}.{part}", source, ir.Shape(shape))
        for part, shape in (("magnitude", source.shape), ("largest", [*outer, 1]), ("share", source.shape))
    )
    integers = ir.Value(name=f"{source.name}.integers", type=ir.TensorType(ir.DataType.UINT8), shape=source.shape)
    last = array_initializer(graph, "rows.last_axis", np.array([-1]))
    insert_before(
        graph,
        before,
        ir.node("Abs", [source], outputs=[magnitude]),
        ir.node("ReduceMax", [magnitude, last], {"keepdims": 1}, outputs=[largest]),
        ir.node("Div", [source, largest], outputs=[share]),
        ir.node("QuantizeLinear", [share, *_step(graph)], outputs=[integers]),
    )
    return integers, largest


def _step(graph: ir.Graph) -> tuple[ir.Value, ir.Value]:
    return array_initializer(graph, STEP, EIGHT.step), array_initializer(graph, ZERO_POINT, EIGHT.zero_point)


def _lower(graph: ir.Graph, node: ir.Node, integers: ir.Value, largest: ir.Value) -> None:
    values, scales = (value.const_value for value in node.inputs[1:3])
    assert values is not None and scales is not None
    output = node.outputs[0]
    name = node.outputs[0].name
    rows, _, columns = (int(size) for size in values.shape)
    matrix = Folded([values], "integers", [columns, rows], _signed_columns, ir.DataType.INT8)
    by_column = Folded([scales], "by column", [rows], lambda arrays: arrays[0].reshape(-1))
    step, zero_point = _step(graph)
    operands = [
        integers,
        add_initializer(graph, f"{node.inputs[1].name}.T", matrix),
        step,
        add_initializer(graph, f"{node.inputs[2].name}.column", by_column),
        zero_point,
    ]
    product, result = (new_value(f"{name}.{part}", output, output.shape) for part in ("sums", "scaled"))
    insert_before(
        graph,
        node,
        ir.node("MatMulIntegerToFloat", operands, domain=MS_DOMAIN, outputs=[product]),
        ir.node("Mul", [product, largest], outputs=[result]),
    )
    ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
    output.name = f"{name}.marker"
    result.name = name


def _signed_columns(arrays: list[np.ndarray]) -> np.ndarray:
    """uint8 [N, 1, K] around 128 as int8 [K, N]."""
    values = arrays[0]
    return (values.reshape(len(values), -1).T ^ np.uint8(128)).view(np.int8)
