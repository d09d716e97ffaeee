"""Attention as batched products against NumPy in float64, including sequences that see no slot."""

import numpy as np
import onnx_ir as ir
import pytest
from export.passes.graphs import finish, operators, parse, random_feeds, run
from onnx_ir.tape import Tape

from tide_export.passes.attention_products import attention_products

SCALE = 0.3
SIZES = {"batch": 3, "seq": 5}


def products(query_heads: int, softcap: float, dtype: str = "float") -> ir.Model:
    """Head width 7 of keys and 3 of values, 11 slots, one KV head for every two or three query heads."""
    kv_heads = 2
    model = parse(
        f"({dtype}[batch, {query_heads}, seq, 7] query, {dtype}[batch, {kv_heads}, 11, 7] keys, "
        f"{dtype}[batch, {kv_heads}, 11, 3] values, bool[batch, 1, seq, 11] visible) "
        f"=> ({dtype}[batch, {query_heads}, seq, 3] output) {{}}"
    )
    tape = Tape()
    output = attention_products(model.graph, tape, *model.graph.inputs, scale=SCALE, softcap=softcap)
    return finish(model, tape, output)


def reference(feeds: dict[str, np.ndarray], softcap: float) -> np.ndarray:
    """softmax(scale · q · kᵀ, soft-capped, of the visible slots) · v, [B, N, S, Dv]."""
    wide = {name: feeds[name].astype(np.float64) for name in ("query", "keys", "values")}
    group = wide["query"].shape[1] // wide["keys"].shape[1]
    keys, values = (np.repeat(wide[name], group, axis=1) for name in ("keys", "values"))
    scores = SCALE * wide["query"] @ keys.swapaxes(2, 3)
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    weights = np.exp(scores) * feeds["visible"]
    return weights / weights.sum(axis=-1, keepdims=True) @ values


def feeds_for(model: ir.Model) -> dict[str, np.ndarray]:
    visible = np.random.default_rng(2).random((3, 1, 5, 11)) < 0.5
    visible[..., 3] = True  # every token sees one slot, so that the reference is defined
    return random_feeds(model, SIZES) | {"visible": visible}


@pytest.mark.parametrize("query_heads", [2, 4, 6])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("dtype, atol", [("float", 1e-6), ("float16", 2e-3)])
def test_products_are_attention(query_heads, softcap, dtype, atol):
    """A query head would be compared with another head's keys, or scores be capped before they are scaled."""
    model = products(query_heads, softcap, dtype)
    feeds = feeds_for(model)
    np.testing.assert_allclose(run(model, feeds)["output"], reference(feeds, softcap), rtol=0, atol=atol)
    assert operators(model)["MatMul"] == 2 and operators(model)["Tanh"] == bool(softcap)


def test_a_token_that_sees_nothing_stays_finite():
    """A sequence without tokens in this step would be NaN, and stop a batch that checks its logits."""
    model = products(4, 0.0)
    feeds = feeds_for(model)
    feeds["visible"][1] = False
    output = run(model, feeds)["output"]
    assert np.isfinite(output).all()
    others = reference({name: array[[0, 2]] for name, array in feeds.items()}, softcap=0.0)
    np.testing.assert_allclose(output[[0, 2]], others, rtol=0, atol=1e-6)


def test_half_precision_scores_do_not_overflow():
    """Large queries and keys, common in fp16 checkpoints, would give scores of infinity before they are scaled."""
    model = products(4, 0.0, "float16")
    feeds = feeds_for(model)
    feeds["query"][:], feeds["keys"][:] = 120, 110  # 7 · 120 · 110 = 92400 > 65504; scaled: 27720
    np.testing.assert_allclose(run(model, feeds)["output"], reference_of_equal_scores(feeds), rtol=0, atol=2e-3)


def reference_of_equal_scores(feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The mean of the visible values: all scores are alike."""
    weights = np.repeat(feeds["visible"].astype(np.float64), 4, axis=1)
    return weights / weights.sum(axis=-1, keepdims=True) @ np.repeat(feeds["values"].astype(np.float64), 2, axis=1)
