"""Head sinks of weight 0 select the older kernel and change no result."""

from __future__ import annotations

import pytest
from export.passes.graphs import assert_same_results, assert_untouched, lowered, only
from export.passes.group_query import GroupQuery, step

from tide_export.passes.attention_ragged import lower_attention_ragged


@pytest.mark.parametrize("attention", [GroupQuery(), GroupQuery(heads=7, kv_heads=1, rotary_width=0), GroupQuery(window=5)])
def test_sinks_change_no_result(attention):
    """A sink with any weight would scale down every attention of a batch."""
    before = attention.graph()
    after, report = lowered(lower_attention_ragged, before)
    assert report.applied == 1 and only(after, "GroupQueryAttention").inputs[11].const_value.shape == [attention.heads]
    assert_same_results(before, after, step(before, [3, 17, 9], 1), tolerance=1e-6)


@pytest.mark.parametrize("window", [0, 7])
def test_the_models_own_sinks_stay(window):
    """Sinks without weight would replace the model's own, which already select the kernel."""
    assert_untouched(lower_attention_ragged, GroupQuery(sinks=True, window=window).graph())


@pytest.mark.parametrize(
    "attention", [GroupQuery(heads=2), GroupQuery(softcap=3.0), GroupQuery(dtype="float16"), GroupQuery(int8=True)]
)
def test_attentions_that_gain_nothing_stay(attention):
    """Multi-head attention would be slower; with a soft-cap, in fp16 or int8 the bundle would hold two equal graphs."""
    assert_untouched(lower_attention_ragged, attention.graph())
