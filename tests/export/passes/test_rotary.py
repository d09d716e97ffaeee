"""Rotary embedding is recognised in the forms that models write it in, and tabulated as it is computed."""

import onnx_ir as ir
import pytest
from export.passes.graphs import parse
from export.passes.rotary_text import Rotary

from tide_export.passes.rotary import Rotation, match_rotation, rotary_tables


def graph(rotary: Rotary) -> ir.Model:
    return parse(
        f"""(float[batch, 3, seq, {rotary.dim}] x, int64[batch, seq] position_ids, float[batch, seq] others)
        => (float[batch, 3, seq, {rotary.dim}] x_rotated) <{rotary.declared}> {{{rotary.tables()} {rotary.rotate("x")}}}""",
        frequencies=rotary.frequencies,
    )


def matched(model: ir.Model, positions: int = 1) -> Rotation | None:
    return match_rotation(model.graph.outputs[0], model.graph.inputs[positions])


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
