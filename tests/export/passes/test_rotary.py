"""Rotary embedding is recognised in the forms that models write it in, and tabulated as it is computed."""

import numpy as np
import onnx_ir as ir
import pytest
from export.passes.graphs import parse, random_feeds, run
from export.passes.rotary_text import Rotary

from tide_export.passes.rotary import Rotation, match_rotation, rotary_tables

FORMS = {
    "halves": Rotary(),
    "neighbours": Rotary(interleaved=True),
    "partial": Rotary(dim=11, width=6),
    "partial neighbours": Rotary(dim=11, width=6, interleaved=True),
}
POSITIONS = np.array([[0, 1, 2], [7, 8, 9], [19, 20, 23]])


def graph(rotary: Rotary) -> ir.Model:
    return parse(
        f"""(float[batch, 3, seq, {rotary.dim}] x, int64[batch, seq] position_ids, float[batch, seq] others)
        => (float[batch, 3, seq, {rotary.dim}] x_rotated) <{rotary.declared}> {{{rotary.tables()} {rotary.rotate("x")}}}""",
        frequencies=rotary.frequencies,
    )


def matched(model: ir.Model, positions: int = 1) -> Rotation | None:
    return match_rotation(model.graph.outputs[0], model.graph.inputs[positions])


@pytest.mark.parametrize("form", FORMS)
def test_rotation_is_recognised(form):
    """A fused kernel would rotate other channels than the model, or a slower attention be chosen for it."""
    rotary, model = FORMS[form], graph(FORMS[form])
    rotation = matched(model)
    assert rotation is not None and rotation.source is model.graph.inputs[0]
    assert (rotation.width, rotation.interleaved) == (rotary.width, rotary.interleaved)
    feeds = random_feeds(model, {"batch": 3, "seq": 3}) | {"position_ids": POSITIONS}
    found = run(model, feeds)["x_rotated"]
    np.testing.assert_allclose(found, rotary.rotated(feeds["x"], POSITIONS), rtol=0, atol=2e-5)  # the graph is what it is named


@pytest.mark.parametrize("form", FORMS)
def test_tables_are_the_angles(form):
    """Every token behind the first would be rotated as if it stood elsewhere."""
    model, rotary = graph(FORMS[form]), FORMS[form]
    rotation = matched(model)
    assert rotation is not None
    found = rotary_tables(rotation, model.graph, model.graph.inputs[1], 11)
    pairs = rotary.frequencies[::2] if rotary.interleaved else rotary.frequencies[: rotary.width // 2]
    angles = np.arange(11)[:, None] * pairs
    for table, expected in zip(found, (np.cos(angles), np.sin(angles)), strict=True):
        assert table.dtype == np.float32 and table.flags.c_contiguous
        np.testing.assert_allclose(table, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_channels_of_a_pair_with_angles_of_their_own(interleaved):
    """A kernel has one angle a pair: the second channel's would be lost."""
    model = graph(Rotary(interleaved=interleaved, twisted=True))
    rotation = matched(model)
    assert rotation is not None and rotary_tables(rotation, model.graph, model.graph.inputs[1], 11) is None


def test_angles_that_are_not_of_the_positions():
    """A table by position would stand in for angles that depend on more, such as the length of the text (dynamic NTK)."""
    assert matched(graph(Rotary()), positions=2) is None


NO_ROTATION = {  # a node of a rotation → what stands in its place
    "the other way round": ("Concat<axis = -1>(x_negated, x_1)", "Concat<axis = -1>(x_1, x_negated)"),
    "not negated": ("Neg(x_2)", "Abs(x_2)"),
    "of another tensor": ("Slice(x, at_half, at_end, at_last)", "Slice(x_straight, at_half, at_end, at_last)"),
    "of one half": ("Slice(x, at_first, at_half, at_last)", "Slice(x, at_half, at_end, at_last)"),
    "subtracted": ("Add(x_straight, x_across)", "Sub(x_straight, x_across)"),
    "of one neighbour": ("Slice(x, at_second, at_end, at_last, at_third)", "Slice(x, at_first, at_end, at_last, at_third)"),
}


@pytest.mark.parametrize("name", NO_ROTATION)
def test_what_is_no_rotation(name):
    """Something like a rotation would be replaced by one."""
    written, instead = NO_ROTATION[name]
    rotary = Rotary(interleaved="neighbour" in name)
    straight = "x_straight = Mul(x, cos)"  # first, so that the others may read it
    nodes = f"{rotary.tables()} {straight} {rotary.rotate('x').replace(straight, '')}"
    assert written in nodes
    for text, recognised in ((nodes, True), (nodes.replace(written, instead), False)):
        model = parse(
            f"""(float[batch, 3, seq, 16] x, int64[batch, seq] position_ids) => (float[batch, 3, seq, 16] x_rotated)
            <{rotary.declared}> {{{text}}}"""
        )
        assert (matched(model) is not None) == recognised
