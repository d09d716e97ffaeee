"""An LM head that multiplies by the embedding as it is stored."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from export.passes.graphs import assert_same_results, assert_untouched, lowered, only, operators, parse

from tide_export.passes.onnxruntime_fusions import share_tied_head

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
