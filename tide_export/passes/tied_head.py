"""Multiply by the embedding as it is stored (FusedMatMul, transB), so that tied weights are stored once."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.passes.attention_gqa import MS_DOMAIN
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import insert_before, is_weight, new_value, produced_by


def share_tied_head(model: ir.Model, context: LoweringContext) -> PassReport:
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
