"""Shapes for compilers: caches of their full length, and targets of reshapes as constants."""

import onnx_ir as ir
import pytest
from export.passes.graphs import assert_same_results, assert_untouched, lowered, only, operators, parse, random_feeds

from tide_export.passes.static_shapes import static_caches, static_reshape


def test_caches_have_their_full_length_everywhere():
    """A compiler would plan for a cache of any length, or for inputs of one length and outputs of another."""
    before = parse(
        """(float[batch, seq, 7] hidden, float[batch, 2, slots, 3] key_cache_0, float[batch, 2, slots, 3] value_cache_0)
        => (float[batch, seq, 7] y, float[batch, 2, slots, 3] key_cache_out_0) {
            y = Neg(hidden)
            half = Mul(key_cache_0, value_cache_0)
            key_cache_out_0 = Add(half, key_cache_0)
        }"""
    )
    after, report = lowered(static_caches, before, max_seq_len=11)
    assert (report.applied, report.skipped) == (2, [])
    values = {v.name: v for v in (*after.graph.inputs, *(out for node in after.graph for out in node.outputs))}
    assert [str(d) for d in values["hidden"].shape] == ["batch", "seq", "7"]
    for name in ("key_cache_0", "value_cache_0", "half", "key_cache_out_0"):
        assert [str(d) for d in values[name].shape] == ["batch", "2", "11", "3"], name
    assert_same_results(before, after, random_feeds(before, {"batch": 3, "seq": 5, "slots": 11}))


def test_a_graph_without_caches():
    """The LM head's number of tokens would become that of the cache's slots."""
    model = parse("(float[batch, slots, 7] hidden) => (float[batch, slots, 7] y) { y = Neg(hidden) }")
    assert_untouched(static_caches, model)
    after, _ = lowered(static_caches, model)
    assert [str(d) for d in after.graph.inputs[0].shape] == ["batch", "slots", "7"]


TARGETS = {  # of x [batch, seq, 12] → the constant
    "batch, seq, 4, 3": [0, 0, 4, 3],
    "batch, 3, seq, 4": [0, 3, -1, 4],
    "rows, 12": [-1, 12],
    "batch, all": [0, -1],
    "36, rest": [36, -1],
}


def reshape(target: str) -> ir.Model:
    """The target is joined at run time, of the sizes of x and of numbers, as models are traced."""
    sizes = {"batch": "b", "seq": "s", "rows": "rows", "all": "all", "rest": "rest"}
    parts = [sizes.get(d, f"n{d}") for d in target.split(", ")]
    numbers = ", ".join(f"int64[1] n{n} = {{{n}}}" for n in (3, 4, 12, 36))
    return parse(
        f"""(float[batch, seq, 12] x) => (float[{target}] y) <{numbers}, float[{target}] shaped> {{
            b = Shape<start = 0, end = 1>(x)
            s = Shape<start = 1, end = 2>(x)
            rows = Mul(b, s)
            all = Mul(s, n12)
            size = Mul(rows, n12)
            rest = Div(size, n36)
            target = Concat<axis = 0>({", ".join(parts)})
            shaped = Reshape<allowzero = 1>(x, target)
            y = Neg(shaped)
        }}"""
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("batch, seq", [(1, 3), (3, 7)])
def test_target_is_a_constant(target, batch, seq):
    """Every layer would compute shapes in every step, by a dozen small nodes; or tokens would be taken for others'."""
    before = reshape(target)
    after, report = lowered(static_reshape, before)
    assert (report.applied, report.skipped) == (1, []) and operators(after) == {"Reshape": 1, "Neg": 1}
    assert only(after, "Reshape").inputs[1].const_value.numpy().tolist() == TARGETS[target]
    assert_same_results(before, after, random_feeds(before, {"batch": batch, "seq": seq}))


def test_two_unknown_dimensions_are_left_and_reported():
    """A reshape can infer one dimension: the other would be a guess."""
    reason = "['batch', 'seq', 12] → ['seq', 'batch', 12] has more than one unknown dimension"
    model = parse(
        """(float[batch, seq, 12] x) => (float[seq, batch, 12] y) <int64[1] n12 = {12}> {
            b = Shape<start = 0, end = 1>(x)
            s = Shape<start = 1, end = 2>(x)
            target = Concat<axis = 0>(s, b, n12)
            y = Reshape(x, target)
        }"""
    )
    assert_untouched(static_reshape, model, reason)
