"""Give the KV caches a static length of ``max_seq_len`` slots, for compilers that need it at build time."""

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
