"""RMSNormalization (ONNX opset 23; Zhang & Sennrich 2019, arXiv:1910.07467): fused from the traced operators, and decomposed
again for TensorRT before 10.15, which lacks it.

    y = x / sqrt(mean(x²) + ε) · w        over the last axis, x in float32
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_ir.tape import Tape

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import (
    array_initializer,
    commuted,
    constant,
    insert_before,
    is_weight,
    new_value,
    produced_by,
    scalar,
    take_place,
)


def fuse_rms_norm(model: ir.Model, context: LoweringContext) -> PassReport:
    """Fuse the traced operators of a norm into one RMSNormalization node."""
    report = PassReport("rms_norm")
    for node in list(model.graph):
        if node.op_type == "ReduceMean":
            _fuse(model.graph, node, report)
    common.RemoveUnusedNodesPass()(model)
    return report


def _fuse(graph: ir.Graph, mean: ir.Node, report: PassReport) -> None:
    where = mean.outputs[0].name
    square = produced_by(mean.inputs[0], "Pow")
    if square is None or scalar(square.inputs[1]) != 2.0:
        return  # a LayerNorm's mean, or not a norm at all
    if not _over_channels(mean):
        report.skip(where, "the mean is not one over channels")
        return
    wide = square.inputs[0]
    assert wide is not None
    shift = _only_user(mean, "Add")
    scaled = _only_user(_inverse_root(shift), "Mul")
    epsilon = next((scalar(v) for v in shift.inputs if is_weight(v)), None) if shift is not None else None
    if scaled is None or epsilon is None or wide not in scaled.inputs:
        report.skip(where, "no x · 1/sqrt(mean(x²) + ε) around this mean")
        return
    narrow = _only_user(scaled, "Cast")
    weighted = _only_user(narrow or scaled, "Mul")
    operands = commuted(weighted, is_weight) if weighted is not None else None
    if weighted is None or operands is None:
        report.skip(where, "the normed value is not multiplied by a weight")
        return
    weight = operands[0]
    last = weighted
    # fp16/bf16 models cast to fp32 first; RMSNormalization does that itself (stash_type).
    widen = produced_by(wide, "Cast")
    source = widen.inputs[0] if widen is not None else wide
    closing = _only_user(weighted, "Cast") if narrow is None and widen is not None else None
    if weight.dtype != source.dtype:
        if closing is None:
            report.skip(where, f"weight is {weight.dtype}, the hidden state {source.dtype}")
            return
        source, last = wide, weighted  # Gemma: (1 + w) in fp32; keep the casts around the norm
    size = weight.shape[-1] if weight.shape is not None and len(weight.shape) else 1
    if weight.shape is None or len(weight.shape) != 1 or source.shape is None or source.shape[-1] != size:
        report.skip(where, f"weight of shape {weight.shape} is not one number per channel")
        return
    output = last.outputs[0]
    fused = ir.node(
        "RMSNormalization",
        [source, weight],
        attributes={"axis": -1, "epsilon": epsilon, "stash_type": 1},
        outputs=[new_value(f"{output.name}.rms", output, output.shape)],
    )
    insert_before(graph, last, fused)
    take_place(fused.outputs[0], output)  # a drafter's state may be a norm's output
    report.applied += 1


def _inverse_root(shift: ir.Node | None) -> ir.Node | None:
    """The node that makes 1/sqrt of the output of ``shift``."""
    power = _only_user(shift, "Pow")
    if power is not None and scalar(power.inputs[1]) == -0.5:
        return power
    return _only_user(_only_user(shift, "Sqrt"), "Reciprocal")


def _over_channels(mean: ir.Node) -> bool:
    """True if ``mean`` reduces the last axis alone and keeps the dimension."""
    axes = constant(mean.inputs[1]) if len(mean.inputs) > 1 else None
    shape = mean.inputs[0].shape
    keeps = mean.attributes.get("keepdims")
    last = (-1,) if shape is None else (-1, len(shape) - 1)
    return axes is not None and axes.size == 1 and int(axes.reshape(())) in last and (keeps is None or keeps.value == 1)


def _only_user(node: ir.Node | None, op_type: str) -> ir.Node | None:
    """The single consumer of the node's output if it is an ``op_type``, else None."""
    if node is None:
        return None
    users = [use.node for use in node.outputs[0].uses()]
    return users[0] if len(users) == 1 and users[0].op_type == op_type else None


def decompose_rms_norm(model: ir.Model, context: LoweringContext) -> PassReport:
    """Replace RMSNormalization by products and a mean."""
    report = PassReport("decompose_rms_norm")
    graph = model.graph
    for node in [n for n in graph if n.op_type == "RMSNormalization"]:
        dtype = node.outputs[0].dtype
        if node.inputs[0].dtype != ir.DataType.FLOAT:
            report.skip(node.outputs[0].name, f"it norms {dtype}, not float32")
            continue
        tape = Tape()
        normed = _normed(graph, tape, node)
        normed.name = node.outputs[0].name
        normed.type = node.outputs[0].type
        normed.shape = node.outputs[0].shape
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
