"""Decompose RMSNormalization (opset 23) into products and a mean, for TensorRT before 10.15, which lacks the operator.

y = x / sqrt(mean(x²) + ε) · w        over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467), x in float32
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer


def decompose_rms_norm(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("decompose_rms_norm")
    graph = model.graph
    for node in [n for n in graph if n.op_type == "RMSNormalization"]:
        dtype = node.outputs[0].dtype
        if node.inputs[0].dtype != ir.DataType.FLOAT:
            report.skip(node.outputs[0].name, f"it norms {dtype}, not float32")
            continue
        tape = Tape()
        normed = _normed(graph, tape, node)
        normed.name, normed.type, normed.shape = node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape
        graph.insert_before(node, tape.nodes)
        ir.convenience.replace_all_uses_with(node.outputs[0], normed, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        report.applied += 1
    return report


def _normed(graph: ir.Graph, tape: Tape, node: ir.Node) -> ir.Value:
    states, weight = node.inputs
    epsilon = float(node.attributes["epsilon"].value)
    last = array_initializer(graph, "rms.last_axis", np.array([-1], np.int64))
    mean = tape.op("ReduceMean", [tape.op("Mul", [states, states]), last])
    shifted = tape.op("Add", [mean, array_initializer(graph, f"rms.epsilon_{epsilon}", np.array(epsilon, np.float32))])
    return tape.op("Mul", [tape.op("Div", [states, tape.op("Sqrt", [shifted])]), weight])
