"""A graph pass: x · sigmoid(x) becomes one node, ONNX Runtime's QuickGelu with alpha 1."""

from __future__ import annotations

import onnx_ir as ir

from tide_export.passes.base import LoweringContext, PassReport, PlacedPass


def quick_silu(model: ir.Model, context: LoweringContext) -> PassReport:
    """Fuse Mul(x, Sigmoid(x)) where nothing else reads the sigmoid."""
    report = PassReport("quick_silu")
    graph = model.graph
    for node in list(graph):
        before = [value.producer() for value in node.inputs if value is not None]
        sigmoid = next((one for one in before if one is not None and one.op_type == "Sigmoid"), None)
        if node.op_type != "Mul" or sigmoid is None or sigmoid.inputs[0] not in node.inputs:
            continue
        if len(sigmoid.outputs[0].uses()) > 1 or sigmoid.outputs[0].is_graph_output():
            report.skip(node.name, "another node reads the sigmoid")
            continue
        fused = ir.node("QuickGelu", [sigmoid.inputs[0]], {"alpha": 1.0}, domain="com.microsoft")
        fused.outputs[0].type = node.outputs[0].type
        fused.outputs[0].shape = node.outputs[0].shape
        graph.insert_before(node, fused)
        ir.convenience.replace_all_uses_with(node.outputs[0], fused.outputs[0], replace_graph_outputs=True)
        graph.remove([node, sigmoid], safe=True)
        report.applied += 1
    graph.opset_imports.setdefault("com.microsoft", 1)
    return report


QUICK_SILU = PlacedPass(quick_silu, targets=("cpu",), after="canonicalize")
