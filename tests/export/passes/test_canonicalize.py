"""Canonical graphs: constants folded, dead code removed, functions inlined."""

import numpy as np
import onnx_ir as ir
import pytest
from export.passes.graphs import assert_same_results, lowered, operators, parse, random_feeds, run

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.canonicalize import canonicalize, simplify

SIZES = {"batch": 3, "seq": 7}


def canonicalized(model: ir.Model, context: LoweringContext) -> PassReport:
    """A trace is simplified when it is made."""
    before = model.graph.num_nodes()
    simplify(model, ())
    report = canonicalize(model, context)
    return PassReport(report.name, before - model.graph.num_nodes(), report.skipped)


# Nodes from x [batch, seq, 11] to y, and the operators that remain. ``Tanh`` separates the tested nodes from the outputs.
SIMPLER = {
    "a cast to its own type": ("a = Cast<to = 1>(x) y = Tanh(a)", {"Tanh": 1}),
    "two transposes": ("a = Transpose<perm = [0, 2, 1]>(x) b = Transpose<perm = [0, 2, 1]>(a) y = Tanh(b)", {"Tanh": 1}),
    "two unsqueezes": (
        "a = Unsqueeze(x, first) b = Unsqueeze(a, first) c = Tanh(b) d = Squeeze(c, both) y = Neg(d)",
        {"Unsqueeze": 1, "Tanh": 1, "Squeeze": 1, "Neg": 1},
    ),
    "arithmetic without effect": ("a = Add(x, zero) b = Mul(a, one) c = Sub(b, zero) d = Div(c, one) y = Tanh(d)", {"Tanh": 1}),
    "dropout": ("a = Dropout(x) y = Tanh(a)", {"Tanh": 1}),
    "arithmetic of constants": ("a = Add(two, two) b = Sqrt(a) c = Mul(x, b) y = Tanh(c)", {"Mul": 1, "Tanh": 1}),
    "the same computed twice": ("a = Tanh(x) b = Tanh(x) y = Mul(a, b)", {"Tanh": 1, "Mul": 1}),
    "unused nodes": ("a = Exp(x) b = Log(a) y = Tanh(x)", {"Tanh": 1}),
}


CONSTANTS = "float zero = {0}, float one = {1}, float two = {2}, int64[1] first = {0}, int64[2] both = {0, 1}"


def graph(nodes: str) -> ir.Model:
    return parse(f"(float[batch, seq, 11] x) => (float[batch, seq, 11] y) <{CONSTANTS}> {{ {nodes} }}")


@pytest.mark.parametrize("name", SIMPLER)
def test_graph_becomes_simpler(name):
    """Every step would compute it again; passes behind this one would not recognise norms and attention."""
    nodes, left = SIMPLER[name]
    before = graph(nodes)
    after, report = lowered(canonicalized, before)
    assert operators(after) == left and report.applied == before.graph.num_nodes() - sum(left.values()) and not report.skipped
    assert_same_results(before, after, random_feeds(before, SIZES), 1e-6)


@pytest.mark.parametrize("operator, number", [("Add", 1e-8), ("Add", 1e-12), ("Sub", 1e-9), ("Mul", 1.000005), ("Div", 0.999995)])
def test_constants_close_to_0_and_1_stay(operator, number):
    """A norm whose epsilon is 1e-8 (Helium) would lose it, and the zero embedding of a padding token would give NaN."""
    text = f"(float[batch] x) => (float[batch] y) <float number> {{ a = {operator}(x, number) y = Tanh(a) }}"
    after, report = lowered(canonicalized, parse(text, number=np.array(number)))
    assert operators(after) == {operator: 1, "Tanh": 1} and report.applied == 0


def test_rounding_to_half_precision_stays():
    """A model that rounds on purpose would compute other numbers than the eager one."""
    before = graph("a = Cast<to = 10>(x) b = Cast<to = 1>(a) y = Tanh(b)")
    after, report = lowered(canonicalized, before)
    assert operators(after)["Cast"] == 2 and report.applied == 0
    feeds = random_feeds(before, SIZES)
    assert_same_results(before, after, feeds)
    assert (run(after, feeds)["y"] != np.tanh(feeds["x"])).any()


def test_no_large_weight_is_copied():
    """An export would hold a second copy of every weight in memory: a model of 8 billion parameters would not fit."""
    model = parse(
        """(float[batch, 3000] x) => (float[batch, 3000] y) <float[3000, 7] scaled, float[3000, 7] turned, float two = {2}> {
            first = Mul(scaled, two)
            second = MatMul(x, first)
            third = Transpose<perm = [1, 0]>(turned)
            y = MatMul(second, third)
        }"""
    )
    weight = model.graph.initializers["turned"].const_value.numpy()
    model.graph.initializers["turned"].const_value = ir.tensor(weight, name="turned")
    after, _ = lowered(canonicalized, model)
    assert operators(after) == {"Mul": 1, "MatMul": 2}
    assert np.shares_memory(after.graph[-1].inputs[1].const_value.numpy(), weight), "a transpose is a view"


def test_functions_are_inlined_and_constants_are_initializers():
    """Passes behind this one read constants from initializers, and norms from the graph itself: they would find none."""
    before = parse(
        """(float[batch, 7] x) => (float[batch, 7] y) { y = tide.Doubled(x) }
        <domain: "tide", opset_import: ["": 24]> Doubled(a) => (b) { two = Constant<value_float = 2.0>() b = Mul(a, two) }"""
    )
    after, _ = lowered(canonicalized, before)
    assert operators(after) == {"Mul": 1} and len(after.graph.initializers) == 1 and not after.functions
    assert_same_results(before, after, random_feeds(before, SIZES))


def test_values_of_parameters_are_not_read():
    """Breaks: a trace in the cache holds numbers of the model that it was made from."""
    model = parse(
        "(float[batch, 7] x) => (float[batch, 7] y) <float[7] weight, float one = {1}> { a = Add(weight, one) y = Mul(x, a) }"
    )
    model.graph.initializers["weight"].const_value = ir.tensor(np.arange(7, dtype=np.float32), name="weight")
    simplify(model, {"weight"})
    assert operators(model) == {"Add": 1, "Mul": 1}
    after, _ = lowered(canonicalize, model)
    assert operators(after) == {"Mul": 1}
