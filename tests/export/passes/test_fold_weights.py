"""Transposes of weights are folded into the weights when the file is written."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from export.passes.graphs import assert_same_results, assert_untouched, lowered, operators, parse, random_feeds

from tide_export.passes.fold_weights import concatenated, fold_weights, transposed


def test_transposed_weights_are_stored_transposed():
    """Every step would transpose every weight, or two different transposes of a weight would share one tensor."""
    before = parse(
        """(float[3, 3] x) => (float[3, 7] a, float[7, 3] b, float[7, 3, 11] c, float[3, 7, 11] d)
        <float[3, 7] flat, float[11, 3, 7] cube> {
            same = Identity(flat)
            a = MatMul(x, same)
            across = Transpose<perm = [1, 0]>(flat)
            b = MatMul(across, x)
            back = Transpose<perm = [2, 1, 0]>(cube)
            c = Exp(back)
            around = Transpose<perm = [1, 2, 0]>(cube)
            d = Exp(around)
        }"""
    )
    after, report = lowered(fold_weights, before)
    assert (report.applied, report.skipped) == (4, []) and operators(after) == {"MatMul": 2, "Exp": 2}
    assert_same_results(before, after, random_feeds(before, {}))


def test_equal_transposes_share_one_tensor():
    """A weight that two layers share would be stored once for each."""
    model = parse(
        """(float[3, 7] x, float[7, 7] y) => (float[3, 3] a, float[7, 3] b) <float[3, 7] w> {
            t1 = Transpose<perm = [1, 0]>(w)
            a = MatMul(x, t1)
            t2 = Transpose<perm = [1, 0]>(w)
            b = MatMul(y, t2)
        }"""
    )
    after, report = lowered(fold_weights, model)
    first, second = (node.inputs[1] for node in after.graph)
    assert report.applied == 2 and first is second
    assert_same_results(model, after, random_feeds(model, {}))


def test_a_weight_that_is_an_output_is_left_and_reported():
    """The graph would lose an output."""
    assert_untouched(
        fold_weights, parse("() => (float[7, 3] y) <float[3, 7] w> { y = Transpose<perm = [1, 0]>(w) }"), "is a graph output"
    )


def test_transposes_of_states_stay():
    """Attention would read its heads in another order."""
    assert_untouched(fold_weights, parse("(float[3, 7] x) => (float[7, 3] y) { t = Transpose<perm = [1, 0]>(x) y = Neg(t) }"))


def test_nothing_is_computed_before_it_is_written():
    """An export would hold each weight in memory twice."""
    reads: list[str] = []

    def read() -> ir.TensorProtocol:
        reads.append("w")
        return ir.tensor(np.arange(21, dtype=np.float32).reshape(3, 7))

    weight = ir.LazyTensor(read, dtype=ir.DataType.FLOAT, shape=ir.Shape([3, 7]))
    joined, turned = concatenated([weight, weight], 1), transposed(weight, [1, 0])
    assert (list(joined.shape), list(turned.shape), reads) == ([3, 14], [7, 3], [])
    np.testing.assert_array_equal(joined.numpy(), np.concatenate([weight.numpy()] * 2, axis=1))
    np.testing.assert_array_equal(turned.numpy(), weight.numpy().T)
