"""A norm as the products and the mean it stands for, for compilers without the operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from export.passes.graphs import assert_same_results, assert_untouched, lowered, operators, parse, random_feeds, run

from tide_export.passes.rms_norm import decompose_rms_norm


def norms(channels: int, dtype: str = "float", second_epsilon: float = 0.5) -> ir.Model:
    """Two in a row; the last one's output is the graph's."""
    return parse(
        f"""({dtype}[batch, seq, {channels}] x) => ({dtype}[batch, seq, {channels}] y)
        <{dtype}[{channels}] first, {dtype}[{channels}] second> {{
            middle = RMSNormalization<axis = -1, epsilon = 0.000001, stash_type = 1>(x, first)
            y = RMSNormalization<axis = -1, epsilon = {second_epsilon}, stash_type = 1>(middle, second)
        }}"""
    )


@pytest.mark.parametrize("channels", [3, 11])
def test_norms_are_decomposed(channels):
    """Hidden states would differ, by one norm's epsilon or weight used for another."""
    before = norms(channels)
    after, report = lowered(decompose_rms_norm, before)
    assert (report.applied, report.skipped) == (2, [])
    assert operators(after) == {"Mul": 4, "ReduceMean": 2, "Add": 2, "Sqrt": 2, "Div": 2}
    assert_same_results(before, after, random_feeds(before, {"batch": 3, "seq": 7}), 1e-6)


def test_a_state_of_zeros_stays_finite():
    """Padding would become NaN and spread through attention: epsilon keeps the root from 0."""
    after, _ = lowered(decompose_rms_norm, norms(3))
    assert (run(after, {"x": np.zeros((1, 7, 3), np.float32)})["y"] == 0).all()


def test_half_precision_is_left_and_reported():
    """The square of a state of 300 is past what half precision holds."""
    reason = "it norms FLOAT16, not float32"
    assert_untouched(decompose_rms_norm, norms(7, "float16"), reason, reason)
