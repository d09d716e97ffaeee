"""Constant folding, dead code, constants as initializers; weights stay lazy so that nothing large is computed here."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer

from .base import LoweringContext, PassReport

# Folding a constant larger than this (elements) would hold a second copy of a weight in memory; fold_weights does it lazily.
_FOLD_LIMIT = 16384


def canonicalize(model: ir.Model, context: LoweringContext) -> PassReport:
    before = model.graph.num_nodes()
    onnxscript.optimizer.optimize(model, input_size_limit=_FOLD_LIMIT, output_size_limit=_FOLD_LIMIT)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.RemoveUnusedNodesPass()(model)
    return PassReport("canonicalize", before - model.graph.num_nodes())
