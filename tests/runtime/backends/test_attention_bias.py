"""Additive mask of the batched attention form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tide_runtime.backends.step_arrays import AttentionBias


@given(st.data())
def test_a_token_sees_itself_and_what_came_before_within_the_window(data: st.DataObject) -> None:
    """Guards against attention to later tokens, to stale slots, or beyond the layer's window."""
    slots, seq = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 9))
    seq, window = min(seq, slots), data.draw(st.integers(0, 30))
    lengths = data.draw(st.lists(st.integers(0, slots - seq), min_size=1, max_size=4))
    bias = AttentionBias(len(lengths), seq, slots, window)
    bias.fill(lengths)
    if max(lengths) + seq < slots and data.draw(st.booleans()):  # the incremental update of decoding
        lengths = [length + 1 for length in lengths]
        bias.fill(lengths)
    for row, length in enumerate(lengths):
        for token in range(seq):
            own = length + token
            seen = [slot for slot in range(slots) if slot <= own and (not window or slot > own - window)]
            expected = np.full(slots, -np.inf)
            expected[seen] = 0
            assert np.array_equal(bias.array[row, token, 0], expected)


@pytest.mark.parametrize(("name", "seen"), [("attention_bias", 6), ("attention_bias_4", 4)])
def test_the_inputs_name_says_the_window(name: str, seen: int) -> None:
    """Guards against a window on the wrong layers."""
    bias = AttentionBias.named(name, batch_size=1, seq=1, slots=8)
    bias.fill([5])
    assert np.count_nonzero(bias.array == 0) == seen
