"""Weights that are stored transposed, and once."""

import numpy as np
import onnx_ir as ir
import pytest
from export.passes.graphs import assert_same_results, assert_untouched, lowered, only, operators, parse, random_feeds

from tide_export.passes.fold_weights import concatenated, fold_weights, transposed
from tide_export.passes.onnxruntime_fusions import share_tied_head


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


VOCAB, HIDDEN = 11, 7


def head(weight: str = "embedding", dtype: str = "float") -> ir.Model:
    return parse(
        f"""(int64[batch, seq] input_ids) => ({dtype}[batch, seq, {VOCAB}] logits, int64[batch, seq] token)
        <{dtype}[{VOCAB}, {HIDDEN}] embedding, {dtype}[{VOCAB}, {HIDDEN}] untied> {{
            hidden = Gather<axis = 0>(embedding, input_ids)
            turned = Transpose<perm = [1, 0]>({weight})
            logits = MatMul(hidden, turned)
            token = ArgMax<axis = -1, keepdims = 0>(logits)
        }}"""
    )


@pytest.mark.parametrize("dtype, tolerance", [("float", 1e-6), ("float16", 2e-3)])
def test_tied_weights_are_stored_once(dtype, tolerance):
    """The largest weight of a small model would be in the bundle, and in memory, twice; or its output have lost its name."""
    before = head(dtype=dtype)
    after, report = lowered(share_tied_head, before)
    assert report.applied == 1 and operators(after) == {"Gather": 1, "FusedMatMul": 1, "ArgMax": 1}
    assert only(after, "FusedMatMul").inputs[1] is only(after, "Gather").inputs[0]
    ids = np.random.default_rng(0).integers(0, VOCAB, (3, 7))
    assert_same_results(before, after, {"input_ids": ids}, tolerance)


def test_a_head_of_its_own():
    """A head that nothing looks up would lose its faster form: its transpose is folded into the stored weight."""
    assert_untouched(share_tied_head, head("untied"))
