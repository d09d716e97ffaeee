"""Lower ``tide::QuantizedMatMul`` to ONNX Runtime's MatMulNBits.

``accuracy_level`` 4: activations are rounded to int8 block by block, as in llama.cpp. With blocks of 16 or 32 (8 bits: up to
64) the result for a token does not depend on the other tokens of the launch, which policy ``exact`` needs; other forms are not
exported.

MatMulNBits has no offsets. Their part of a product is Σ_b offsets[n, b] · Σ_{k in b} x[k]: sums over blocks, which products of
the same input share, times a matrix of a 32nd of the size.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.passes.attention_gqa import MS_DOMAIN
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.fold_weights import transposed
from tide_export.passes.graph_walk import add_initializer, as_type_of, insert_before, new_value
from tide_export.passes.quantize_weights import QUANTIZED_MATMUL

ACCURACY_LEVEL = 4


def lower_quantized_matmul(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("quantized_matmul")
    graph = model.graph
    sums: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in [n for n in graph if n.op_type == QUANTIZED_MATMUL]:
        _lower(graph, node, sums)
        report.applied += 1
    if report.applied:
        model.opset_imports[MS_DOMAIN] = 1
        common.RemoveUnusedNodesPass()(model)
    return report


def _lower(graph: ir.Graph, node: ir.Node, sums: dict[tuple[ir.Value, int], ir.Value]) -> None:
    source, values, scales, zeros, offsets = (*node.inputs, None, None)[:5]
    output = node.outputs[0]
    name, shape = output.name, output.shape
    attributes = {key: attribute.value for key, attribute in node.attributes.items()}
    product = ir.node(
        "MatMulNBits",
        [source, values, as_type_of(graph, source, scales), *([zeros] if zeros is not None else [])],
        attributes={**attributes, "accuracy_level": ACCURACY_LEVEL},
        domain=MS_DOMAIN,
        outputs=[new_value(f"{name}.nbits", output, shape)],
    )
    result = product.outputs[0]
    insert_before(graph, node, product)
    if offsets is not None:
        key = (source, attributes["block_size"])
        if key not in sums:
            sums[key] = _block_sums(graph, node, source, attributes["K"], attributes["block_size"])
        matrix = add_initializer(graph, f"{offsets.name}.T", transposed(offsets.const_value, [1, 0]))
        part = ir.node(
            "MatMul", [sums[key], as_type_of(graph, source, matrix)], outputs=[new_value(f"{name}.offsets", output, shape)]
        )
        total = ir.node("Add", [result, part.outputs[0]], outputs=[new_value(f"{name}.sum", output, shape)])
        insert_before(graph, node, part, total)
        result = total.outputs[0]
    ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
    output.name, result.name = f"{name}.marker", name


def _block_sums(graph: ir.Graph, anchor: ir.Node, source: ir.Value, columns: int, block_size: int) -> ir.Value:
    """[B, S, K] → [B, S, K / block_size]."""
    ones = np.kron(np.eye(columns // block_size, dtype=np.float32), np.ones((block_size, 1), np.float32))
    matrix = add_initializer(graph, f"block_sums_{columns}_{block_size}", ir.tensor(ones))
    shape = ir.Shape([*list(source.shape)[:-1], columns // block_size])
    node = ir.node(
        "MatMul", [source, as_type_of(graph, source, matrix)], outputs=[new_value(f"{source.name}.block_sums", source, shape)]
    )
    insert_before(graph, anchor, node)
    return node.outputs[0]
