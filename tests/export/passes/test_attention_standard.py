"""Attention and cache update in ONNX's operators of opset 24, against NumPy in float64."""

import onnx_ir as ir
import pytest
from export.passes.graphs import assert_untouched, lowered, operators, parse
from export.passes.one_attention import CASES, check_one_attention, one_attention

from tide_export.passes.attention_standard import lower_attention_standard


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seq", [1, 5])
def test_attention_and_caches(dtype, case, seq):
    """Tokens would attend to hidden slots or another head's keys, or overwrite another sequence's cache."""
    after = check_one_attention(lower_attention_standard, dtype, case, seq)
    assert operators(after)["TensorScatter"] == 2 and operators(after)["Attention"] == int(not case[2])


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("seq", [1, 5])
def test_sinks_join_the_softmax(dtype, window, seq):
    """Attention weights of a model with sinks (gpt-oss) would sum to one, or a head take another head's sink."""
    after = check_one_attention(lower_attention_standard, dtype, (6, window, 0.0), seq, sinks=True)
    assert operators(after)["TensorScatter"] == 2 and not operators(after)["Attention"]


def test_sinks_are_decomposed_and_reported():
    """ONNX's Attention has no input for sinks; the export would not report why this attention is slower."""
    _, report = lowered(lower_attention_standard, one_attention(ir.DataType.FLOAT, 4, 0, 0.0, sinks=True))
    assert report.skipped == ["key_cache_out_0: it has sinks, which the operator lacks (decomposed instead)"]


def test_a_soft_cap_is_decomposed_and_reported():
    """TensorRT's Attention rejects a soft-cap; the export would not report why this attention is slower."""
    after, report = lowered(lower_attention_standard, one_attention(ir.DataType.FLOAT, 4, 0, 3.0))
    assert report.applied == 1 and operators(after)["Tanh"] == 1
    assert report.skipped == ["key_cache_out_0: it has a soft-cap, which the operator refuses on GPUs (decomposed instead)"]


def test_layers_share_their_mask():
    """Every layer would recompute the mask, which is equal for all."""
    counts = [
        operators(lowered(lower_attention_standard, one_attention(ir.DataType.FLOAT, 4, 5, 0.0, layers=n))[0]) for n in (1, 3)
    ]
    assert counts[0]["Less"] == counts[1]["Less"] == 1 and counts[0]["Shape"] == counts[1]["Shape"]
    assert counts[1]["Attention"] == 3


def test_a_graph_without_attention():
    """The LM head would gain nodes that read inputs it does not have."""
    assert_untouched(
        lower_attention_standard, parse("(float[batch, seq, 7] hidden) => (float[batch, seq, 7] y) { y = Neg(hidden) }")
    )
