"""Which form of a segment a step runs in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tide_runtime import Engine
from tide_runtime.backends.attention import prefers_plain, products_pay


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("seq", [1, 4, 256])
def test_one_row_never_reads_empty_slots(seq: int, pays: bool) -> None:
    """A single chat would slow down with the size of its cache, and load a second copy of the weights."""
    assert not prefers_plain([900], seq, 1024, pays)


@pytest.mark.parametrize("lengths", [[0, 0], [3, 900], [1000] * 8])
def test_several_tokens_of_several_rows_are_plain(lengths: list[int]) -> None:
    """GroupQueryAttention refuses such a step: verification of drafts in a batch would fail."""
    assert prefers_plain(lengths, 2, 1024, pays=False)


@pytest.mark.parametrize(
    ("lengths", "slots", "pays", "plain"),
    [
        ([400] * 8, 480, True, True),
        ([400] * 8, 480, False, False),
        ([4000] + [50] * 7, 4096, True, False),  # the short rows would read 4096 slots each
    ],
)
def test_one_token_each_takes_the_faster_form(lengths: list[int], slots: int, pays: bool, plain: bool) -> None:
    """Batches would decode slower than their contents need."""
    assert prefers_plain(lengths, 1, slots, pays) == plain


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "pay"),
    [(32, 4, "fp32", True), (32, 8, "fp32", False), (32, 8, "fp16", True), (0, 4, "fp32", False)],
)
def test_products_pay_where_many_heads_share_keys_or_no_kernel_is_there(
    load: Callable[..., Engine], heads: int, kv_heads: int, dtype: str, pay: bool
) -> None:
    """Batches would decode slower: models of many heads a KV head without products, those of few with them."""
    with load() as engine:
        known = engine.manifest
        model, kv = replace(known.model, attention_heads=heads), [replace(layer, heads=kv_heads) for layer in known.kv]
        assert products_pay(replace(known, model=model, kv=kv, dtype=dtype)) == pay
