"""Graphs that TensorRT 10.4 cannot read are rejected with the operator's name."""

from __future__ import annotations

import numpy as np
import pytest
from export.passes.graphs import assert_same_results, lowered, parse, random_feeds
from tide_runtime.errors import UnsupportedModelError

from tide_export.passes.tensorrt_10_4 import check_tensorrt_10_4

SCATTER = "(float[2, 7] x, int64[1, 1] at, float[1, 7] new) => (float[2, 7] y) { y = ScatterND%s(x, at, new) }"
READABLE = {
    "a mean over constant axes": "(float[3, 7] x) => (float[3, 1] y) <int64[1] axis = {-1}> { y = ReduceMean(x, axis) }",
    "a scatter": SCATTER % "",
    "a choice by booleans": "(bool[7] b, float[7] x, float[7] z) => (float[7] y) { y = Where(b, x, z) }",
}
REFUSED = {
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


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_operators_are_named(message):
    """A model that V100's TensorRT cannot read would fail there, after the copy, in the parser's words."""
    with pytest.raises(UnsupportedModelError, match=message):
        lowered(check_tensorrt_10_4, parse(REFUSED[message]))


def test_all_that_is_missing_is_named_at_once():
    """Each export would find one operator more."""
    text = "(float[7] x) => (float[7] y) { a = com.microsoft.Gelu(x) b = com.microsoft.QuickGelu(x) y = Add(x, x) }"
    with pytest.raises(
        UnsupportedModelError, match=r"com\.microsoft\.Gelu; it knows no com\.microsoft\.QuickGelu.*--list-targets"
    ):
        lowered(check_tensorrt_10_4, parse(text))
