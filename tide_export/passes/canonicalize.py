"""Fold constants and remove dead code; weights stay lazy, so nothing large is computed here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.pattern import Constant, RewriteRule
from onnxscript.rewriter.rules import common as rules

from tide_export.passes.base import LoweringContext, PassReport

# Elements. Folding a larger constant would hold a second copy of a weight in memory; fold_weights folds those lazily.
_FOLD_LIMIT = 16384
_LIFT = common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)
_ITERATIONS = 2  # folding enables rules and rules enable folding
# onnxscript's own rules match with a tolerance (1e-8 as 0, 1.00001 as 1): a norm would lose its epsilon and divide 0 by 0.
_ZERO, _ONE, _TWENTY = (Constant(number, rel_tol=0.0, abs_tol=0.0) for number in (0, 1, 20))
_EXACT_RULES = [
    RewriteRule(lambda op, x: x + _ZERO, lambda op, x: op.Identity(x), name="add_0"),
    RewriteRule(lambda op, x: x - _ZERO, lambda op, x: op.Identity(x), name="sub_0"),
    RewriteRule(lambda op, x: x * _ONE, lambda op, x: op.Identity(x), name="mul_by_1"),
    RewriteRule(lambda op, x: x / _ONE, lambda op, x: op.Identity(x), name="div_by_1"),
    # torch's threshold, above which a softplus is its input: in floating point it is without one.
    RewriteRule(lambda op, x: op.Where(op.Greater(x, _TWENTY), x, op.Softplus(x)), lambda op, x: op.Softplus(x), name="softplus"),
]
# The rules of `onnxscript.optimizer.optimize` without those for convolutions, which decoders lack, and without slice_split_rule,
# which compares every slice with every node: it takes two thirds of the time and applied to no model tried.
_RULES = [
    *_EXACT_RULES,
    rules.cast_cast_rule,
    rules.cast_constant_of_shape_rule,
    rules.cast_constant_of_shape_without_value_rule,
    rules.collapse_slice2_rule,
    rules.collapse_slice_rule,
    rules.dropout_inference_rule,
    rules.dropout_zero_rule,
    rules.flatten_to_reshape_rule,
    rules.materialize_reshape_shape_rule,
    rules.no_op_cast_rule,
    rules.no_op_dynamic_scatter_nd_rule,
    rules.no_op_expand_rule,
    rules.no_op_static_scatter_nd_rule,
    rules.no_op_transpose_rule,
    rules.one_reshape_matmul_reshape_rule,
    rules.remove_optional_bias_from_gemm_rule,
    rules.reshape_reshape_rule,
    rules.squeeze_reshape_1d_rule,
    rules.transpose_transpose_rule,
    rules.two_reshapes_matmul_reshape_rule,
    rules.unsqueeze_unsqueeze_rule,
]


def simplify(model: ir.Model, parameters: Collection[str]) -> None:
    """`canonicalize` a trace in place before its layers are repeated, as it takes milliseconds a node; the values of the
    initializers ``parameters`` are not read."""
    values = [value for name, value in model.graph.initializers.items() if name in parameters]
    held = [value.const_value for value in values]
    for value in values:
        value.const_value = None
    onnxscript.optimizer.inline(model)
    for _ in range(_ITERATIONS):
        _fold(model)
    _LIFT(model)  # a constant that several layers read belongs to none
    for value, tensor in zip(values, held, strict=True):
        value.const_value = tensor


def _fold(model: ir.Model) -> None:
    onnxscript.optimizer.fold_constants(
        model, onnx_shape_inference=True, input_size_limit=_FOLD_LIMIT, output_size_limit=_FOLD_LIMIT
    )
    common.RemoveUnusedNodesPass()(model)  # a rule does not apply to a value that another node reads too
    RewritePass(_RULES)(model)


def canonicalize(model: ir.Model, context: LoweringContext) -> PassReport:
    before = model.graph.num_nodes()
    onnxscript.optimizer.inline(model)
    _fold(model)
    for tidy in (
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        _LIFT,
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
        common.RemoveUnusedNodesPass(),
    ):
        tidy(model)
    return PassReport("canonicalize", before - model.graph.num_nodes())


def inline_functions(model: ir.Model, context: LoweringContext) -> PassReport:
    """Inline the model's functions, for compilers that cannot read function bodies."""
    return PassReport("inline_functions", _inline(model))


@dataclass(frozen=True)
class InlineAllBut:
    """`inline_functions` for a runtime that has a kernel for the function named ``kernel_function``."""

    kernel_function: str

    def __call__(self, model: ir.Model, context: LoweringContext) -> PassReport:
        return PassReport("inline_functions", _inline(model, self.kernel_function))


def _inline(model: ir.Model, kernel_function: str = "") -> int:
    calls = sum(1 for node in model.graph if node.op_identifier() in model.functions and node.op_type != kernel_function)
    if calls:
        common.InlinePass(criteria=lambda function: function.name != kernel_function)(model)
        common.RemoveUnusedOpsetsPass()(model)
        common.ShapeInferencePass()(model)  # values of a function have no types before inlining
    return calls
