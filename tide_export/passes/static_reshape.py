"""Replace computed Reshape targets by constants: batch and sequence become 0 (copy the dimension), so no Shape/Concat is left."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer, dims, is_weight


def static_reshape(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("static_reshape")
    for node in list(model.graph):
        if node.op_type != "Reshape" or is_weight(node.inputs[1]):
            continue
        source, target = dims(node.inputs[0]), dims(node.outputs[0])
        constant_target = _constant_target(source, target)
        if constant_target is None:
            report.skip(node.outputs[0].name, f"{source} → {target} has more than one unknown dimension")
            continue
        name = "reshape." + "x".join(str(d) for d in constant_target)
        node.replace_input_with(1, array_initializer(model.graph, name, np.array(constant_target, dtype=np.int64)))
        node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)
        report.applied += 1
    common.RemoveUnusedNodesPass()(model)
    return report


def _constant_target(source: list | None, target: list | None) -> list[int] | None:
    """The reshape target with 0 for copied and at most one -1 for inferred dimensions; None if that is ambiguous."""
    if source is None or target is None:
        return None
    result: list[int] = []
    for i, dim in enumerate(target):
        if isinstance(dim, int):
            result.append(dim)
        elif dim is not None and i < len(source) and source[i] == dim:
            result.append(0)
        else:
            result.append(-1)
    return result if result.count(-1) <= 1 and 0 not in target else None
