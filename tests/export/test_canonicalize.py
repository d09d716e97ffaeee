"""Canonicalization removes arithmetic that changes nothing, and no other."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tide_export.passes.base import LoweringContext
from tide_export.passes.canonicalize import canonicalize


def operators_left(operator: str, number: float) -> list[str]:
    """The graph sqrt(x ∘ number) after the pass."""
    constant = ir.val("number", const_value=ir.tensor(np.array(number, np.float32), name="number"))
    given = ir.val("x", dtype=ir.DataType.FLOAT, shape=[2])
    first = ir.node(operator, [given, constant])
    second = ir.node("Sqrt", first.outputs)
    for name, value in (("y", first.outputs[0]), ("z", second.outputs[0])):
        value.name, value.type, value.shape = name, given.type, given.shape
    graph = ir.Graph([given], second.outputs, nodes=[first, second], initializers=[constant], opset_imports={"": 24}, name="g")
    model = ir.Model(graph, ir_version=10)
    canonicalize(model, LoweringContext(max_seq_len=8))
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("operator, number", [("Add", 1e-8), ("Add", 1e-12), ("Sub", 1e-9), ("Mul", 1.000005), ("Div", 0.999995)])
def test_small_constants_stay(operator, number):
    """A norm whose epsilon is 1e-8 (Helium) would lose it, and the zero embedding of a padding token would give NaN."""
    assert operators_left(operator, number) == [operator, "Sqrt"]


@pytest.mark.parametrize("operator, number", [("Add", 0.0), ("Sub", 0.0), ("Mul", 1.0), ("Div", 1.0)])
def test_arithmetic_without_effect_goes(operator, number):
    """Each would be a node more to run in every layer, and stand between the nodes that other passes recognise."""
    assert operators_left(operator, number) == ["Sqrt"]
