"""Query, key and value by one product."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from export.passes.graphs import assert_same_results, assert_untouched, lowered, only, operators
from export.passes.group_query import HIDDEN, GroupQuery, step

from tide_export.passes.pack_projections import pack_projections

NOT_PLAIN = "query, key or value is not a plain projection (normed, sliced or already packed)"
NOT_ALIKE = "query, key and value are projected from different inputs, not all with a bias, or with weights of different forms"


@pytest.mark.parametrize("projections", ["separate", "biased"])
@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (3, 3), (7, 1)])
def test_one_product_for_three(projections, heads, kv_heads):
    """Queries would be taken for keys, where their widths differ; or lose their bias."""
    attention = GroupQuery(heads, kv_heads, projections=projections)
    before = attention.graph()
    after, report = lowered(pack_projections, before)
    assert (report.applied, report.skipped) == (1, [])
    assert operators(after)["MatMul"] == 2 and operators(after)["Add"] == (projections == "biased")
    packed = after.graph.initializers["key_cache_out_0.packed_weight"].const_value
    assert list(packed.shape) == [HIDDEN, sum(attention.widths.values())]
    assert_same_results(before, after, step(before, [0, 0, 0], 7), 1e-6)


@pytest.mark.parametrize(
    "projections, node, instead, reason",
    [
        ("packed", "", "", NOT_PLAIN),
        ("separate", "k = MatMul(hidden, w_k)", "k_raw = MatMul(hidden, w_k) k = Neg(k_raw)", NOT_PLAIN),
        ("separate", "k = MatMul(hidden, w_k)", "other = Neg(hidden) k = MatMul(other, w_k)", NOT_ALIKE),
        ("biased", "q_product = MatMul(hidden, w_q)\nq = Add(q_product, b_q)", "q = MatMul(hidden, w_q)", NOT_ALIKE),
    ],
)
def test_what_cannot_be_joined_is_left_and_reported(projections, node, instead, reason):
    """A norm on the keys, or a bias, would be lost; the export would not tell why."""
    assert_untouched(pack_projections, GroupQuery(projections=projections).graph(replace=(node, instead)), reason)


@pytest.mark.parametrize("as_output", [True, False])
def test_a_projection_that_is_read_elsewhere(as_output):
    """The product would be computed twice, once alone and once joined with others."""
    model = GroupQuery(projections="biased").graph()
    value = only(model, "GroupQueryAttention").inputs[2]
    if not as_output:
        reader = ir.node("Neg", [value], outputs=[ir.val("negated", dtype=ir.DataType.FLOAT)])
        model.graph.append(reader)
        value = reader.outputs[0]
    model.graph.outputs.append(value)
    assert_untouched(pack_projections, model, NOT_PLAIN)
