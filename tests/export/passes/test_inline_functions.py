"""A function's body in place of its calls."""

from __future__ import annotations

import onnx_ir as ir
from export.passes.graphs import assert_same_results, assert_untouched, lowered, operators, parse, random_feeds

from tide_export.passes.canonicalize import inline_functions

GRAPH = """(float[batch, 7] x, float[batch, 7] y) => (float[batch, 7] z) {
    first = tide.ScaledSum<factor = 2.0>(x, y)
    z = tide.ScaledSum<factor = -0.5>(y, first)
}
<domain: "tide", opset_import: ["": 24]> ScaledSum<factor>(a, b) => (c) {
    number = Constant<value_float: float = @factor>()
    scaled = Mul(a, number)
    c = Add(scaled, b)
}"""


def test_calls_become_their_bodies():
    """A compiler would take the function for a plugin of that name; or two calls' attributes and operands would be mixed up."""
    before = parse(GRAPH)
    after, report = lowered(inline_functions, before)
    assert (report.applied, report.skipped) == (2, [])
    assert operators(after) == {"Constant": 2, "Mul": 2, "Add": 2} and not after.functions and "tide" not in after.opset_imports
    assert all(value.dtype == ir.DataType.FLOAT and value.shape is not None for node in after.graph for value in node.outputs)
    assert_same_results(before, after, random_feeds(before, {"batch": 3}))


def test_a_graph_without_functions():
    """Graphs that need nothing would be inferred and renamed anew, and no longer be the same bytes."""
    assert_untouched(inline_functions, parse("(float[batch, 7] x) => (float[batch, 7] y) { y = Neg(x) }"))
