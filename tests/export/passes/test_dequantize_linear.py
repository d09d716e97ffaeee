"""Products with low-bit weights, as each target takes them."""

import numpy as np
import onnx_ir as ir
import pytest
from export.passes.graphs import assert_same_results, operators, parse, random_feeds

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.dequantize_linear import lower_dequantize_linear, weight_only_int4
from tide_export.passes.quantize_weights import QuantizeWeights
from tide_export.weights.quantized_weight import QuantizedWeight

K, N = 64, 40
PRODUCTS = f"""(float[B, S, {K}] x, int64[T] ids) => (float[B, S, {N}] y, float[B, S, {N}] z, float[T, {K}] rows)
    <float[{N}, {K}] a, float[{N}, {K}] b, float[B, S, {N}] y, float[B, S, {N}] z> {{
    a_t = Transpose<perm = [1, 0]>(a)
    b_t = Transpose<perm = [1, 0]>(b)
    y = MatMul(x, a_t)
    z = MatMul(x, b_t)
    rows = Gather<axis = 0>(a, ids)
}}"""


def weight(bits: int = 4, block_size: int = 32, features: int = N, zeros: bool = False, offsets: bool = False) -> QuantizedWeight:
    random, blocks = np.random.default_rng(features + bits), (features, K // block_size)
    return QuantizedWeight(
        bits,
        random.integers(0, 1 << bits, (features, K), np.uint8),
        random.uniform(0.01, 0.1, blocks).astype(np.float32),
        random.integers(0, 1 << bits, blocks, np.uint8) if zeros else None,
        random.normal(size=blocks).astype(np.float32) if offsets else None,
    )


def graph(a: QuantizedWeight, b: QuantizedWeight, dtype: str = "float") -> ir.Model:
    text = PRODUCTS.replace("float", dtype).replace(f"[{N}, {K}] a", f"[{a.shape[0]}, {K}] a")
    return parse(text.replace(f"S, {N}] y", f"S, {a.shape[0]}] y"), a=a.dequantized(), b=b.dequantized())


def quantized(model: ir.Model, target: QuantizeWeights, a: QuantizedWeight, b: QuantizedWeight) -> tuple[ir.Model, PassReport]:
    copy, context = model.clone(), LoweringContext(K, {"a": a, "b": b})
    report = target(copy, context)
    lower_dequantize_linear(copy, context)
    return copy, report


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("zeros", "offsets"), [(False, False), (True, False), (False, True), (True, True)])
def test_int4_with_whatever_a_block_has(zeros, offsets, block_size):
    """TensorRT's int4 has no zero points: weights would be shifted, blocks taken along the wrong dimension, or halves swapped."""
    a, b = (weight(block_size=block_size, zeros=zeros, offsets=offsets) for _ in range(2))
    before = graph(a, b)
    after, report = quantized(before, weight_only_int4([86, 80]), a, b)
    assert report.applied == 2
    found = operators(after)
    assert found["DequantizeLinear"] == 2 and found["QuantizedMatMul"] == 0
    assert found["ReduceSum"] == (zeros or offsets)  # products of one input share them
    assert_same_results(before, after, random_feeds(before, {"B": 2, "S": 3}) | {"ids": np.array([0, N - 1])}, 1e-5)


@pytest.mark.parametrize(
    ("target", "form", "reason"),
    [
        (weight_only_int4([75, 80]), {}, "the target has no products with low-bit weights"),
        (weight_only_int4([80]), {"bits": 8}, "the target multiplies with weights of 4 bits, not 8"),
        (weight_only_int4([80]), {"features": N + 1}, "the target takes low-bit weights whose output is a multiple of 2 wide"),
    ],
)
def test_what_a_target_does_not_take_stays_dense_and_is_said(target, form, reason):
    """An engine would not build, or be slower than a dense one; or nobody would be told that it is as large."""
    a, b = weight(**form), weight()
    before = graph(a, b)
    after, report = quantized(before, target, a, b)
    reasons = [skipped.split(": ", 1)[1] for skipped in report.skipped]
    assert reasons.count(reason) == 2 - report.applied == 2 - len(target.bits)
    assert reasons.count("the embedding is looked up in full precision") == 1
    assert_same_results(before, after, random_feeds(before, {"B": 1, "S": 2}) | {"ids": np.array([1])}, 1e-5)


def test_look_ups_in_fp16():
    """The rows of a low-bit embedding would be fp32 in a graph of fp16."""
    a, b = weight(bits=8), weight()
    before = graph(a, b, "float16")
    after, report = quantized(before, QuantizeWeights((), look_ups=True), a, b)
    assert report.applied == operators(after)["GatherBlockQuantized"] == 1
    assert_same_results(before, after, random_feeds(before, {"B": 1, "S": 2}) | {"ids": np.array([1, 3])}, 1e-3)
