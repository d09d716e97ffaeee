"""The output ``token`` is -1 where logits are not finite."""

import numpy as np
import onnx_ir as ir
import pytest
from export.passes.graphs import assert_untouched, lowered, operators, parse, random_feeds, run

from tide_export.passes.guard_token import guard_token, leave_out_token

SIZES = {"wanted": 3}
VOCAB = 11


def head(dtype: str = "float") -> ir.Model:
    return parse(
        f"""({dtype}[1, wanted, {VOCAB}] hidden) => ({dtype}[1, wanted, {VOCAB}] logits, int64[1, wanted] token) {{
            logits = Identity(hidden)
            token = ArgMax<axis = -1, keepdims = 0>(logits)
        }}"""
    )


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_finite_logits_name_the_same_token(dtype):
    """Greedy text would change, or a runtime not find the output that it reads tokens from."""
    before = head(dtype)
    after, report = lowered(guard_token, before)
    assert (report.applied, report.skipped) == (1, []) and operators(after)["Where"] == 1
    feeds = random_feeds(before, SIZES)
    feeds["hidden"][0, 1] = -np.finfo(feeds["hidden"].dtype).max  # the smallest logits there are
    expected, found = run(before, feeds), run(after, feeds)
    assert list(found) == ["logits", "token"] and (found["token"] >= 0).all()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("value, place", [(np.inf, 0), (np.inf, VOCAB - 1), (np.nan, slice(None))])
def test_a_likeliest_logit_that_is_not_finite_names_no_token(dtype, value, place):
    """Generation would go on with an arbitrary token. (NaN comes of a state of NaN, which makes all logits NaN.)"""
    before = head(dtype)
    after, _ = lowered(guard_token, before)
    feeds = random_feeds(before, SIZES)
    expected = run(before, feeds)["token"]
    feeds["hidden"][0, 1, place], expected[0, 1] = value, -1
    np.testing.assert_array_equal(run(after, feeds)["token"], expected)


def test_the_host_finds_the_token_where_it_is_faster():
    """A step of the CPU would wait for a node that takes twenty times NumPy's time, or half precision for NumPy."""
    after, report = lowered(leave_out_token, head())
    assert [value.name for value in after.graph.outputs] == ["logits"] and "ArgMax" not in operators(after)
    assert report.applied == 1
    assert_untouched(leave_out_token, head("float16"))
