"""A segment of one attention with the inputs of segments, and its float64 reference in NumPy."""

import numpy as np
import onnx_ir as ir
from export.passes.graphs import SLOTS, lowered, random_feeds, run

from tide_export.passes.base import GraphPass

KV_HEADS, KEY_DIM, VALUE_DIM = 2, 16, 8
LENGTHS = np.array([0, 11, 19])  # filled slots of three sequences
TOLERANCES = {ir.DataType.FLOAT: 2e-6, ir.DataType.FLOAT16: 4e-3}
CASES = ((2, 0, 0.0), (8, 0, 0.0), (4, 5, 0.0), (2, 0, 3.0), (6, 7, 3.0), (4, 99, 0.0))
"""Query heads, window in tokens, soft-cap: one and several query heads a KV head, a window shorter and longer than the cache."""


def one_attention(
    dtype: ir.DataType,
    heads: int,
    window: int,
    softcap: float,
    value_dim: int = VALUE_DIM,
    layers: int = 1,
    sinks: bool = False,
) -> ir.Model:
    """The traced form: a ``tide::Attention`` over caches of ``SLOTS`` slots; ``hidden`` only gives the number of tokens.

    Args:
        layers: number of attentions; all take the same query, key and value.
        sinks: add the input ``sinks`` [N], a logit per query head that joins the softmax and has no value.
    """
    projected = {"query": (heads, KEY_DIM), "key": (KV_HEADS, KEY_DIM), "value": (KV_HEADS, value_dim)}
    qkv = [ir.val(name, dtype=dtype, shape=["batch", n, "seq", width]) for name, (n, width) in projected.items()]
    write_index = ir.val("write_index", dtype=ir.DataType.INT64, shape=["batch"])
    hidden = ir.val("hidden", dtype=dtype, shape=["batch", "seq", 4])
    attributes = {"scale": KEY_DIM**-0.5, "softcap": softcap, "window": window}
    optional = [ir.val("sinks", dtype=dtype, shape=[heads])] if sinks else []
    inputs, outputs, nodes = [hidden, *qkv, write_index, *optional], [], []
    for layer in range(layers):
        shapes = [("batch", KV_HEADS, SLOTS, width) for width in (KEY_DIM, value_dim)]
        names = (f"key_cache_{layer}", f"value_cache_{layer}")
        caches = [ir.val(name, dtype=dtype, shape=shape) for name, shape in zip(names, shapes, strict=True)]
        operands = [*qkv, *caches, write_index, *optional]
        node = ir.node("Attention", operands, attributes=attributes, domain="tide", num_outputs=3)
        made = (f"output_{layer}" if layer else "output", f"key_cache_out_{layer}", f"value_cache_out_{layer}")
        for output, name, shape in zip(node.outputs, made, [("batch", "seq", heads, value_dim), *shapes], strict=True):
            output.name, output.dtype, output.shape = name, dtype, ir.Shape(shape)
        inputs, outputs, nodes = [*inputs, *caches], [*outputs, *node.outputs], [*nodes, node]
    return ir.Model(ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 24, "tide": 1}, name="one"), ir_version=10)


def written(cache: np.ndarray, new: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``cache`` [B, KV, slots, D] with ``new`` [B, KV, S, D] written after the filled slots of each sequence."""
    cache = cache.copy()
    for sequence, length in enumerate(lengths):
        cache[sequence, :, length : length + new.shape[2]] = new[sequence]
    return cache


def attended(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    lengths: np.ndarray,
    scale: float,
    window: int,
    softcap: float,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention [B, S, N, Dv] of ``query`` [B, N, S, D] over written caches [B, KV, slots, D], head by head and token by token.

    weights = exp(scores) / (Σ exp(scores) + exp(sinks[n])), the last term only with ``sinks`` [N].
    """
    query, keys, values = (array.astype(np.float64) for array in (query, keys, values))
    logits = np.full(query.shape[1], -np.inf) if sinks is None else sinks.astype(np.float64)
    group = query.shape[1] // keys.shape[1]
    output = np.zeros((*query.shape[:3], values.shape[3]))
    for b, n, s in np.ndindex(query.shape[:3]):
        end = lengths[b] + s + 1
        seen = slice(max(0, end - window) if window else 0, end)
        scores = keys[b, n // group, seen] @ query[b, n, s] * scale
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        largest = max(scores.max(), logits[n])
        weights = np.exp(scores - largest)
        output[b, n, s] = weights @ values[b, n // group, seen] / (weights.sum() + np.exp(logits[n] - largest))
    return output.transpose(0, 2, 1, 3)


def check_one_attention(
    graph_pass: GraphPass, dtype: ir.DataType, case: tuple[int, int, float], seq: int, sinks: bool = False
) -> ir.Model:
    """Lower one attention and compare it with NumPy, its caches bit by bit; returns the lowered graph."""
    heads, window, softcap = case
    model = one_attention(dtype, heads, window, softcap, sinks=sinks)
    after, report = lowered(graph_pass, model)
    assert report.applied == 1 and not [node for node in after.graph if node.domain == "tide"]
    given = random_feeds(model, {"batch": len(LENGTHS), "seq": seq}, seed=seq) | {"write_index": LENGTHS}
    output, *caches = run(after, given).values()
    expected = [written(given[f"{kind}_cache_0"], given[kind], LENGTHS) for kind in ("key", "value")]
    for cache, wanted in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(cache, wanted)
    reference = attended(given["query"], *expected, LENGTHS, KEY_DIM**-0.5, window, softcap, given.get("sinks"))
    np.testing.assert_allclose(output.astype(np.float64), reference, rtol=0, atol=TOLERANCES[dtype])
    return after
