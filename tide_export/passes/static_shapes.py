"""Sizes that are known at export: the length of the KV caches, and the targets of Reshape."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer, dims, is_weight, rename_dims


def static_caches(model: ir.Model, context: LoweringContext) -> PassReport:
    """Give the KV caches ``max_seq_len`` slots, for compilers that need a static length at build time."""
    graph = model.graph
    caches = [value for value in graph.inputs if "_cache_" in (value.name or "")]
    values = [*graph.inputs, *graph.outputs, *(output for node in graph for output in node.outputs)]
    rename_dims(values, {cache.shape[2]: context.max_seq_len for cache in caches})
    return PassReport("static_caches", len(caches))


def static_reshape(model: ir.Model, context: LoweringContext) -> PassReport:
    """Replace computed targets by constants: batch and sequence become 0, which copies them, so no Shape or Concat is left."""
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
