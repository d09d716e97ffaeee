"""Reject graphs that TensorRT 10.4's ONNX parser cannot read, at export and by operator, not on the machine with the GPU."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
from tide_runtime.errors import UnsupportedModelError

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import is_weight
from tide_export.targets.tensorrt_10_4_operators import CONSTANT_INPUTS, ELEMENT_TYPES, REFUSED_ATTRIBUTES


def check_tensorrt_10_4(model: ir.Model, context: LoweringContext) -> PassReport:
    """Raises UnsupportedModelError that lists each operator, element type and input that is not in the parser's table."""
    common.ShapeInferencePass()(model)
    nodes = list(model.graph)
    problems = sorted({problem for node in nodes if (problem := _problem(node))})
    if problems:
        raise UnsupportedModelError(
            f"TensorRT 10.4, the last one for V100, cannot read {model.graph.name}: {'; '.join(problems)}. "
            "Export this model for another target (tide-export --list-targets)"
        )
    return PassReport("tensorrt_10_4_check", len(nodes))


def _problem(node: ir.Node) -> str:
    """Why the parser would refuse ``node``, or an empty string."""
    name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    if name not in ELEMENT_TYPES:
        return f"it knows no {name}"
    operand = node.inputs[1 if name == "Where" else 0] if node.inputs else node.outputs[0]
    dtype = operand.dtype.name if operand.dtype is not None else "an unknown type"
    if dtype not in ELEMENT_TYPES[name]:
        return f"it has no {name} of {dtype}"
    position = CONSTANT_INPUTS.get(name)
    if position is not None and len(node.inputs) > position and not is_weight(node.inputs[position]):
        return f"{name} wants a constant as input {position}"
    refused = next((a for a in node.attributes if (name, a) in REFUSED_ATTRIBUTES), None)
    return f"{name} takes no {refused}" if refused else ""
