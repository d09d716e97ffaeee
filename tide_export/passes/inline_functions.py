"""Inline the model's functions, for compilers that cannot read function bodies."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.passes.base import LoweringContext, PassReport


def inline_functions(model: ir.Model, context: LoweringContext) -> PassReport:
    calls = sum(1 for node in model.graph if node.op_identifier() in model.functions)
    if calls:
        common.InlinePass()(model)
        common.RemoveUnusedOpsetsPass()(model)
        common.ShapeInferencePass()(model)  # values of a function have no types before inlining
    return PassReport("inline_functions", calls)
