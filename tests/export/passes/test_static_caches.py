"""Caches get a static length."""

from __future__ import annotations

from export.passes.graphs import assert_same_results, assert_untouched, lowered, parse, random_feeds

from tide_export.passes.static_shapes import static_caches


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
