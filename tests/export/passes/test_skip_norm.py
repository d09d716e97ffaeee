"""A residual sum and the norm behind it as one kernel."""

import onnx_ir as ir
import pytest
from export.passes.graphs import assert_same_results, assert_untouched, lowered, only, operators, parse, random_feeds

from tide_export.passes.onnxruntime_fusions import fuse_skip_norm

SIZES = {"batch": 3, "seq": 7}


def block(
    channels: int = 11,
    dtype: str = "float",
    total: str = "hidden_out = Add(x, branch)",
    branch: str = "batch, seq, ",
    last: str = "y = Neg(normed)",
) -> ir.Model:
    """The sum is read twice: by the norm, and as the state that the next segment gets. ``branch``: its outer dimensions."""
    return parse(
        f"""({dtype}[batch, seq, {channels}] x, {dtype}[{branch}{channels}] branch)
        => ({dtype}[batch, seq, {channels}] y, {dtype}[batch, seq, {channels}] hidden_out) <{dtype}[{channels}] weight> {{
            {total}
            normed = RMSNormalization<axis = -1, epsilon = 0.25, stash_type = 1>(hidden_out, weight)
            {last}
        }}"""
    )


@pytest.mark.parametrize("channels", [3, 11])
@pytest.mark.parametrize("dtype, tolerance", [("float", 1e-6), ("float16", 2e-3)])
def test_sum_and_norm_are_one_kernel(channels, dtype, tolerance):
    """The next layer would get the normed state in place of the sum, or a norm with another epsilon."""
    before = block(channels, dtype)
    after, report = lowered(fuse_skip_norm, before)
    assert (report.applied, report.skipped) == (1, [])
    assert operators(after) == {"SkipSimplifiedLayerNormalization": 1, "Neg": 1}
    assert only(after, "SkipSimplifiedLayerNormalization").attributes["epsilon"].value == 0.25
    assert_same_results(before, after, random_feeds(before, SIZES), tolerance)


def test_the_sum_is_read_before_its_norm():
    """The kernel that makes the sum would stand behind a node that reads it: a graph that does not load."""
    before = block(total="hidden_out = Add(x, branch) early = Tanh(hidden_out)", last="y = Mul(normed, early)")
    after, report = lowered(fuse_skip_norm, before)
    assert report.applied == 1
    assert_same_results(before, after, random_feeds(before, SIZES), 1e-6)


@pytest.mark.parametrize(
    "reason, model",
    [
        ("its input is not a sum", block(total="hidden_out = Mul(x, branch)")),
        ("the summands differ in shape", block(branch="")),
    ],
)
def test_what_the_kernel_lacks_is_left_and_reported(reason, model):
    """The kernel would refuse the graph, or add a product."""
    assert_untouched(fuse_skip_norm, model, reason)
