"""Attention and cache update in ONNX's operators of opset 24, and in those of opset 20, against NumPy in float64."""

import numpy as np
import onnx_ir as ir
import pytest
from export.passes.graphs import SLOTS, finish, lowered, operators, parse, random_feeds, run
from export.passes.one_attention import CASES, check_one_attention, one_attention
from onnx_ir.tape import Tape

from tide_export.passes.attention_primitives import lower_attention_primitives
from tide_export.passes.attention_products import attention_products
from tide_export.passes.attention_standard import lower_attention_standard
from tide_export.passes.base import LoweringContext, run_passes
from tide_export.passes.tensorrt_10_4 import check_tensorrt_10_4, declare_opset_20

PASSES = [lower_attention_standard, lower_attention_primitives]
WITH_SINKS = [((*case, True)) for case in ((6, 0, 0.0), (6, 7, 0.0))]


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16])
@pytest.mark.parametrize("case", [*((*case, False) for case in CASES), *WITH_SINKS])
@pytest.mark.parametrize("seq", [1, 5])
@pytest.mark.parametrize("graph_pass", PASSES)
def test_attention_and_caches(graph_pass, dtype, case, seq):
    """Tokens would attend to hidden slots or another head's keys, overwrite another sequence's cache, or take another head's
    sink."""
    *form, sinks = case
    found = operators(check_one_attention(graph_pass, dtype, form, seq, sinks))
    standard = graph_pass is lower_attention_standard
    assert (found["TensorScatter"], found["ScatterND"]) == ((2, 0) if standard else (0, 2))
    assert found["Attention"] == (standard and not form[2] and not sinks)


@pytest.mark.parametrize("sinks", [False, True])
def test_tensorrt_10_4_can_read_it(sinks):
    """A V100's compiler would refuse the graph on the machine it was exported for."""
    model = one_attention(ir.DataType.FLOAT16, 6, 7, 3.0, sinks=sinks)
    run_passes(model, (lower_attention_primitives, declare_opset_20, check_tensorrt_10_4), LoweringContext(SLOTS))


@pytest.mark.parametrize(
    ("softcap", "sinks", "reason"),
    [
        (0.0, True, "it has sinks, which the operator lacks (decomposed instead)"),
        (3.0, False, "it has a soft-cap, which the operator refuses on GPUs (decomposed instead)"),
    ],
)
def test_what_is_decomposed_is_reported(softcap, sinks, reason):
    """The export would not report why this attention is slower."""
    _, report = lowered(lower_attention_standard, one_attention(ir.DataType.FLOAT, 4, 0, softcap, sinks=sinks))
    assert report.skipped == [f"key_cache_out_0: {reason}"]


@pytest.mark.parametrize(("graph_pass", "shared"), zip(PASSES, [("Less", "Shape"), ("Less", "Range")], strict=True))
def test_layers_share_positions_and_mask(graph_pass, shared):
    """Every layer would recompute write positions and mask, which are equal for all."""
    one, three = (operators(lowered(graph_pass, one_attention(ir.DataType.FLOAT, 4, 5, 0.0, layers=n))[0]) for n in (1, 3))
    assert [one[name] for name in shared] == [three[name] for name in shared] and one["Less"] >= 1


def products(dtype: str) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """Attention as batched products over 11 slots, some of which each token sees, and its inputs."""
    shapes = f"{dtype}[batch, 4, seq, 7] query, {dtype}[batch, 2, 11, 7] keys, {dtype}[batch, 2, 11, 3] values"
    model = parse(f"({shapes}, bool[batch, 1, seq, 11] visible) => ({dtype}[batch, 4, seq, 3] output) {{}}")
    tape = Tape()
    finish(model, tape, attention_products(model.graph, tape, *model.graph.inputs, scale=0.3, softcap=0.0))
    visible = np.random.default_rng(2).random((3, 1, 5, 11)) < 0.5
    visible[..., 3] = True
    return model, random_feeds(model, {"batch": 3, "seq": 5}) | {"visible": visible}


def test_a_token_that_sees_nothing_stays_finite():
    """A sequence without tokens in this step would be NaN, and stop a batch that checks its logits."""
    model, feeds = products("float")
    alone = run(model, feeds)["output"]
    feeds["visible"][1] = False
    output = run(model, feeds)["output"]
    assert np.isfinite(output).all()
    np.testing.assert_allclose(output[[0, 2]], alone[[0, 2]], rtol=0, atol=1e-6)


def test_half_precision_scores_do_not_overflow():
    """Large queries and keys, common in fp16 checkpoints, would give scores of infinity before they are scaled."""
    model, feeds = products("float16")
    feeds["query"][:], feeds["keys"][:] = 120, 110  # 7 · 120 · 110 = 92400 > 65504; scaled: 27720, alike for all slots
    weights, values = (np.repeat(feeds[name].astype(np.float64), n, axis=1) for name, n in (("visible", 4), ("values", 2)))
    np.testing.assert_allclose(run(model, feeds)["output"], weights / weights.sum(-1, keepdims=True) @ values, rtol=0, atol=2e-3)
