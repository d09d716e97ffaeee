"""Declare opset 20 for a graph of a later opset, for ONNX parsers of 2024 (TensorRT 10.4, ONNX 1.16).

Opsets 21 to 24 add operators, attributes and types, and change no meaning. A node that opset 20 lacks is an error here, because a
parser may ignore an unknown attribute.
"""

from __future__ import annotations

import onnx
import onnx.defs
import onnx_ir as ir
import onnx_ir.passes.common as common
from tide_runtime.errors import UnsupportedModelError

from tide_export.passes.base import LoweringContext, PassReport

OPSET = 20


def declare_opset_20(model: ir.Model, context: LoweringContext) -> PassReport:
    """Raises UnsupportedModelError for a node of ONNX's own domain that opset 20 does not know."""
    nodes = [node for node in model.graph if node.domain == ""]
    unknown = sorted({problem for node in nodes if (problem := _unknown(node))})
    if unknown:
        raise UnsupportedModelError(
            f"{model.graph.name} cannot be written in ONNX opset {OPSET}, which knows no {', '.join(unknown)}; "
            "choose a target with a newer compiler (tide-export --list-targets)"
        )
    common.RemoveUnusedOpsetsPass()(model)
    model.opset_imports[""] = OPSET
    return PassReport("opset_20", len(nodes))


def _unknown(node: ir.Node) -> str:
    """The operator or attribute of ``node`` that opset 20 lacks, or an empty string."""
    try:
        schema = onnx.defs.get_schema(node.op_type, OPSET)
    except onnx.defs.SchemaError:
        return node.op_type
    unknown = sorted(set(node.attributes) - set(schema.attributes))
    return f"{node.op_type}.{unknown[0]}" if unknown else ""
