"""Passes leave graphs alone that have nothing for them, such as those of the LM head."""

import pytest
from export.passes.graphs import assert_untouched, parse

from tide_export.passes.attention_gqa import lower_attention_gqa
from tide_export.passes.attention_padded import pad_attention
from tide_export.passes.attention_primitives import lower_attention_primitives
from tide_export.passes.attention_standard import lower_attention_standard
from tide_export.passes.canonicalize import inline_functions
from tide_export.passes.guard_token import guard_token

PASSES = [lower_attention_gqa, pad_attention, lower_attention_primitives, lower_attention_standard, inline_functions, guard_token]


@pytest.mark.parametrize("graph_pass", PASSES)
def test_the_graph_stays(graph_pass):
    """The head, whose tokens are packed as well, would gain inputs that no runtime fills, or no longer be the same bytes."""
    assert_untouched(graph_pass, parse("(float[batch, seq, 7] hidden) => (float[batch, seq, 7] y) { y = Neg(hidden) }"))
