"""Constant folding, dead code, constants as initializers; weights stay lazy so that nothing large is computed here."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules import common as rules

from tide_export.passes.base import LoweringContext, PassReport

# Folding a constant larger than this (elements) would hold a second copy of a weight in memory; fold_weights does it lazily.
_FOLD_LIMIT = 16384
_ITERATIONS = 2  # folding uncovers what a rule matches, and the other way round
# `onnxscript.optimizer.optimize` has these and more: rules for convolutions, which decoders lack, and slice_split_rule, which
# compares every slice with every node of the graph: two thirds of the time, and it applies to none that was tried.
_RULES = [
    rules.add_0_rule,
    rules.cast_cast_rule,
    rules.cast_constant_of_shape_rule,
    rules.cast_constant_of_shape_without_value_rule,
    rules.collapse_slice2_rule,
    rules.collapse_slice_rule,
    rules.div_by_1_rule,
    rules.dropout_inference_rule,
    rules.dropout_zero_rule,
    rules.flatten_to_reshape_rule,
    rules.materialize_reshape_shape_rule,
    rules.mul_by_1_rule,
    rules.no_op_cast_rule,
    rules.no_op_dynamic_scatter_nd_rule,
    rules.no_op_expand_rule,
    rules.no_op_static_scatter_nd_rule,
    rules.no_op_transpose_rule,
    rules.one_reshape_matmul_reshape_rule,
    rules.remove_optional_bias_from_gemm_rule,
    rules.reshape_reshape_rule,
    rules.squeeze_reshape_1d_rule,
    rules.sub_0_rule,
    rules.transpose_transpose_rule,
    rules.two_reshapes_matmul_reshape_rule,
    rules.unsqueeze_unsqueeze_rule,
]


def canonicalize(model: ir.Model, context: LoweringContext) -> PassReport:
    before = model.graph.num_nodes()
    onnxscript.optimizer.inline(model)
    for _ in range(_ITERATIONS):
        onnxscript.optimizer.fold_constants(
            model, onnx_shape_inference=True, input_size_limit=_FOLD_LIMIT, output_size_limit=_FOLD_LIMIT
        )
        RewritePass(_RULES)(model)
        common.RemoveUnusedNodesPass()(model)
    for tidy in (
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
        common.RemoveUnusedNodesPass(),
    ):
        tidy(model)
    return PassReport("canonicalize", before - model.graph.num_nodes())
