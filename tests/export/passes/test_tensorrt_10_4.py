"""What TensorRT 10.4 reads: opset 20, and operators of its table."""

import numpy as np
import pytest
from export.passes.graphs import assert_same_results, lowered, parse, random_feeds
from tide_runtime.errors import UnsupportedModelError

from tide_export.passes.tensorrt_10_4 import check_tensorrt_10_4, declare_opset_20


def test_the_same_graph_in_opset_20():
    """A parser of 2024 would refuse the file for its number alone."""
    before = parse(
        """(float[batch, 3, 7] x) => (float[batch, 7] y) <int64[1] axis = {1}, int64[2] target = {0, -1}> {
            mean = ReduceMean<keepdims = 0>(x, axis)
            half = Cast<to = 10>(mean)
            wide = Cast<to = 1>(half)
            soft = Softmax<axis = -1>(wide)
            y = Reshape<allowzero = 0>(soft, target)
        }"""
    )
    after, report = lowered(declare_opset_20, before)
    assert (report.applied, dict(after.opset_imports)) == (5, {"": 20})
    assert_same_results(before, after, random_feeds(before, {"batch": 11}))


REFUSED = {
    "RMSNormalization": "(float[2, 7] x) => (float[2, 7] y) <float[7] w> { y = RMSNormalization<axis = -1>(x, w) }",
    r"Cast\.round_mode": '(float[7] x) => (int64[7] y) { y = Cast<to = 7, round_mode = "up">(x) }',
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_opset_20_lacks_is_named(named):
    """The file would declare an opset that it violates; a parser may then silently drop an attribute."""
    with pytest.raises(UnsupportedModelError, match=named):
        lowered(declare_opset_20, parse(REFUSED[named]))


SCATTER = "(float[2, 7] x, int64[1, 1] at, float[1, 7] new) => (float[2, 7] y) { y = ScatterND%s(x, at, new) }"


READABLE = {
    "a mean over constant axes": "(float[3, 7] x) => (float[3, 1] y) <int64[1] axis = {-1}> { y = ReduceMean(x, axis) }",
    "a scatter": SCATTER % "",
    "a choice by booleans": "(bool[7] b, float[7] x, float[7] z) => (float[7] y) { y = Where(b, x, z) }",
}


UNSUPPORTED = {
    r"it knows no com\.microsoft\.Gelu": "(float[7] x) => (float[7] y) { y = com.microsoft.Gelu(x) }",
    "it has no CumSum of INT64": "(int64[7] x) => (int64[7] y) <int64 axis = {0}> { y = CumSum(x, axis) }",
    "it has no Where of DOUBLE": "(bool[7] b, double[7] x, double[7] z) => (double[7] y) { y = Where(b, x, z) }",
    "it has no Gelu of an unknown type": "(float[7] x) => (float[7] y) { z = com.microsoft.Gelu(x) y = Gelu(z) }",
    "ReduceMean wants a constant as input 1": "(float[7] x, int64[1] axes) => (float[1] y) { y = ReduceMean(x, axes) }",
    "ScatterND takes no reduction": SCATTER % '<reduction = "add">',
}


@pytest.mark.parametrize("name", READABLE)
def test_supported_graphs_pass_unchanged(name):
    """A model that V100 could run would be refused, or changed by a check."""
    before = parse(READABLE[name])
    after, report = lowered(check_tensorrt_10_4, before)
    assert (report.applied, report.skipped) == (1, [])
    chosen = {"at": np.array([[1]]), "b": np.arange(7) % 3 == 0}
    assert_same_results(before, after, random_feeds(before, {}) | chosen)


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_unsupported_operators_are_named(message):
    """A model that V100's TensorRT cannot read would fail there, after the copy, in the parser's words."""
    with pytest.raises(UnsupportedModelError, match=message):
        lowered(check_tensorrt_10_4, parse(UNSUPPORTED[message]))
