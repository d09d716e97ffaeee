"""Fused operators of ONNX Runtime: residual sum and norm, and a product with the embedding as it is stored."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.passes.attention_gqa import MS_DOMAIN
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import dims, insert_before, is_weight, new_value, produced_by, take_place


def fuse_skip_norm(model: ir.Model, context: LoweringContext) -> PassReport:
    """Fuse the residual addition and the norm that follows it into SkipSimplifiedLayerNormalization."""
    report = PassReport("skip_norm")
    graph = model.graph
    for norm in [n for n in graph if n.op_type == "RMSNormalization"]:
        total = produced_by(norm.inputs[0], "Add")
        if total is None:
            report.skip(norm.outputs[0].name, "its input is not a sum")
            continue
        first, second = total.inputs
        residual = total.outputs[0]
        shape = dims(residual)
        if shape is None or len(shape) != 3 or any(v is None or dims(v) != shape for v in (first, second)):
            report.skip(norm.outputs[0].name, "the summands differ in shape")
            continue
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [first, second, norm.inputs[1]],
            attributes={"epsilon": float(norm.attributes["epsilon"].value)},
            domain=MS_DOMAIN,
            outputs=[
                new_value(f"{norm.outputs[0].name}.skip", norm.outputs[0], norm.outputs[0].shape),
                ir.Value(name=""),
                ir.Value(name=""),
                new_value(f"{residual.name}.sum", residual, residual.shape),
            ],
        )
        insert_before(graph, norm, fused)
        take_place(fused.outputs[0], norm.outputs[0])
        ir.convenience.replace_all_uses_with(residual, fused.outputs[3], replace_graph_outputs=True)
        fused.outputs[3].name = residual.name
        for node in (norm, total):
            graph.remove(node, safe=True)
        report.applied += 1
    if report.applied:
        model.opset_imports[MS_DOMAIN] = 1
    common.TopologicalSortPass()(model)
    return report


def share_tied_head(model: ir.Model, context: LoweringContext) -> PassReport:
    """Multiply by the embedding as it is stored (FusedMatMul, transB), so that tied weights are stored once."""
    report = PassReport("tied_head")
    for node in [n for n in model.graph if n.op_type == "MatMul"]:
        transpose = produced_by(node.inputs[1], "Transpose")
        weight = transpose.inputs[0] if transpose is not None else None
        if weight is None or not is_weight(weight) or not any(u.node.op_type == "Gather" for u in weight.uses()):
            continue
        output = node.outputs[0]
        fused = ir.node(
            "FusedMatMul",
            [node.inputs[0], weight],
            attributes={"transB": 1},
            domain=MS_DOMAIN,
            outputs=[new_value(f"{output.name}.tied", output, output.shape)],
        )
        insert_before(model.graph, node, fused)
        ir.convenience.replace_all_uses_with(output, fused.outputs[0], replace_graph_outputs=True)
        if output.name == "logits":
            output.name, fused.outputs[0].name = "logits.untied", "logits"
        report.applied += 1
    if report.applied:
        model.opset_imports[MS_DOMAIN] = 1
    common.RemoveUnusedNodesPass()(model)
    return report
