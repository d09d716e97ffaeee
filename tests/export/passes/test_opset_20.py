"""A graph whose operators opset 20 has is declared as opset 20."""

from __future__ import annotations

import pytest
from export.passes.graphs import assert_same_results, lowered, parse, random_feeds
from tide_runtime.errors import UnsupportedModelError

from tide_export.passes.tensorrt_10_4 import declare_opset_20


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


def test_operators_of_other_domains_are_not_judged():
    """A plugin's operator is the compiler's own business."""
    model = parse("(float[7] x) => (float[7] y) { y = com.microsoft.FastGelu(x) }")
    after, report = lowered(declare_opset_20, model)
    assert report.applied == 0 and dict(after.opset_imports) == {"": 20, "com.microsoft": 1}
