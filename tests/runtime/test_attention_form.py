"""Which form of a segment a step runs in."""

from __future__ import annotations

import pytest
from tide_runtime.backends.attention_form import prefers_plain


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("seq", [1, 4, 256])
def test_one_row_never_reads_empty_slots(seq: int, fp32: bool) -> None:
    """A single chat would slow down with the size of its cache, and load a second copy of the weights."""
    assert not prefers_plain([900], seq, 1024, fp32)


@pytest.mark.parametrize("lengths", [[0, 0], [3, 900], [1000] * 8])
def test_several_tokens_of_several_rows_are_plain(lengths: list[int]) -> None:
    """GroupQueryAttention refuses such a step: verification of drafts in a batch would fail."""
    assert prefers_plain(lengths, 2, 1024, fp32=True)


@pytest.mark.parametrize(
    ("lengths", "slots", "fp32", "plain"),
    [
        ([400] * 8, 480, False, True),
        ([400] * 8, 480, True, False),  # there is a kernel for it
        ([4000] + [50] * 7, 4096, False, False),  # the short rows would read 4096 slots each
    ],
)
def test_one_token_each_takes_the_faster_form(lengths: list[int], slots: int, fp32: bool, plain: bool) -> None:
    """Batches would decode slower than their contents need."""
    assert prefers_plain(lengths, 1, slots, fp32) == plain
