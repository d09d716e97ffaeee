"""Attention and cache update as GPU targets have them, in primitive and in ONNX's own operators, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from export.one_attention import KEY_DIM, KV_HEADS, SLOTS, VALUE_DIM, one_attention

from tide_export.passes.attention_primitives import lower_attention_primitives
from tide_export.passes.attention_standard import lower_attention_standard
from tide_export.passes.base import LoweringContext, run_passes
from tide_export.passes.opset_20 import declare_opset_20
from tide_export.passes.tensorrt_10_4_check import check_tensorrt_10_4

BATCH = 3
LENGTHS = np.array([0, 11, 19])
DTYPES = {"fp32": (ir.DataType.FLOAT, np.float32, 2e-6), "fp16": (ir.DataType.FLOAT16, np.float16, 4e-3)}
LOWERINGS = {
    "primitives": (lower_attention_primitives, declare_opset_20, check_tensorrt_10_4),
    "standard": (lower_attention_standard,),
}


def expected(given: dict[str, np.ndarray], window: int, softcap: float) -> np.ndarray:
    """[B, S, N, Dv], head by head and token by token."""
    query, group = given["query"].astype(np.float64), given["query"].shape[1] // KV_HEADS
    output = np.zeros((*query.shape[:3], VALUE_DIM))
    for b, n, s in np.ndindex(query.shape[:3]):
        seen = slice(max(0, LENGTHS[b] + s + 1 - window) if window else 0, LENGTHS[b] + s + 1)
        keys, values = (given[f"{kind}_cache_0"][b, n // group, seen].astype(np.float64) for kind in ("key", "value"))
        scores = keys @ query[b, n, s] * KEY_DIM**-0.5
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        sink = given["sinks"][n].astype(np.float64) if "sinks" in given else -np.inf
        largest = max(scores.max(), sink)
        weights = np.exp(scores - largest)
        output[b, n, s] = weights @ values / (weights.sum() + np.exp(sink - largest))
    return output.transpose(0, 2, 1, 3)


@pytest.mark.parametrize("form", LOWERINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, window, softcap, sinks",
    [
        (2, 0, 0.0, False),
        (8, 0, 0.0, False),
        (4, 5, 0.0, False),
        (2, 0, 3.0, False),
        (6, 7, 3.0, False),
        (4, 99, 0.0, False),
        (2, 0, 0.0, True),
        (6, 7, 0.0, True),
    ],
)
@pytest.mark.parametrize("seq", [1, 5])
def test_attention_and_caches(form, dtype, heads, window, softcap, sinks, seq):
    """Tokens would look at slots they may not see, at another head's keys or sink, or be written where another row's stand."""
    onnx_type, numpy_type, tolerance = DTYPES[dtype]
    model = one_attention(onnx_type, heads, window, softcap, sinks)
    run_passes(model, LOWERINGS[form], LoweringContext(SLOTS))
    random = np.random.default_rng([heads, window, seq])
    shapes = {v.name: [{"batch": BATCH, "seq": seq}.get(str(d), d) for d in v.shape] for v in model.graph.inputs}
    given = {name: random.normal(size=shape).astype(numpy_type) for name, shape in shapes.items()}
    given["write_index"] = LENGTHS.astype(np.int64)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    output, *caches = session.run(None, given)
    for cache, kind in zip(caches, ("key", "value"), strict=True):
        for row, length in enumerate(LENGTHS):
            given[f"{kind}_cache_0"][row, :, length : length + seq] = given[kind][row]
        np.testing.assert_array_equal(cache, given[f"{kind}_cache_0"])
    np.testing.assert_allclose(output.astype(np.float64), expected(given, window, softcap), rtol=0, atol=tolerance)
