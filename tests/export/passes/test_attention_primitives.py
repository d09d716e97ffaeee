"""Attention and cache update in operators of opset 20, against NumPy in float64."""

import onnx_ir as ir
import pytest
from export.passes.graphs import assert_untouched, lowered, operators, parse
from export.passes.one_attention import CASES, SLOTS, check_one_attention, one_attention

from tide_export.passes.attention_primitives import lower_attention_primitives
from tide_export.passes.base import LoweringContext, run_passes
from tide_export.passes.tensorrt_10_4 import check_tensorrt_10_4, declare_opset_20


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seq", [1, 5])
def test_attention_and_caches(dtype, case, seq):
    """Tokens would attend to hidden slots or another head's keys, or overwrite another sequence's cache."""
    after = check_one_attention(lower_attention_primitives, dtype, case, seq)
    assert operators(after)["ScatterND"] == 2 and not {"Attention", "TensorScatter"} & set(operators(after))


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("seq", [1, 5])
def test_sinks_join_the_softmax(dtype, window, seq):
    """Attention weights of a model with sinks (gpt-oss) would sum to one, or a head take another head's sink."""
    check_one_attention(lower_attention_primitives, dtype, (6, window, 0.0), seq, sinks=True)


@pytest.mark.parametrize("sinks", [False, True])
def test_tensorrt_10_4_can_read_it(sinks):
    """A V100's compiler would refuse the graph on the machine it was exported for."""
    model = one_attention(ir.DataType.FLOAT16, 6, 7, 3.0, sinks=sinks)
    run_passes(model, (lower_attention_primitives, declare_opset_20, check_tensorrt_10_4), LoweringContext(SLOTS))


def test_layers_share_positions_and_mask():
    """Every layer would recompute write positions and mask, which are equal for all."""
    counts = [
        operators(lowered(lower_attention_primitives, one_attention(ir.DataType.FLOAT, 4, 0, 0.0, layers=n))[0]) for n in (1, 3)
    ]
    assert counts[0]["Range"] == counts[1]["Range"] and counts[0]["Less"] == counts[1]["Less"] == 1
    assert counts[1]["Softmax"] == 3


def test_a_graph_without_attention():
    """The LM head would gain nodes that read inputs it does not have."""
    assert_untouched(
        lower_attention_primitives, parse("(float[batch, seq, 7] hidden) => (float[batch, seq, 7] y) { y = Neg(hidden) }")
    )
