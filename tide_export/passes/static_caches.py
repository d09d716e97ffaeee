"""Give the KV caches their full length, ``max_seq_len`` slots, where a compiler wants to know it when it builds."""

from __future__ import annotations

import onnx_ir as ir

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import rename_dims


def static_caches(model: ir.Model, context: LoweringContext) -> PassReport:
    graph = model.graph
    caches = [value for value in graph.inputs if "_cache_" in (value.name or "")]
    values = [*graph.inputs, *graph.outputs, *(output for node in graph for output in node.outputs)]
    rename_dims(values, {cache.shape[2]: context.max_seq_len for cache in caches})
    return PassReport("static_caches", len(caches))
