"""Choice of the attention form that a step runs in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tide_runtime import Engine
from tide_runtime.backends.attention import batched_decode_is_faster, prefers_batched


@pytest.mark.parametrize("decode_is_faster", [True, False])
@pytest.mark.parametrize("seq", [1, 4, 256])
def test_a_single_sequence_never_reads_empty_slots(seq: int, decode_is_faster: bool) -> None:
    """Guards against a single chat that slows down with its cache size and loads a second copy of the weights."""
    assert not prefers_batched([900], seq, 1024, decode_is_faster)


@pytest.mark.parametrize("num_cached_tokens", [[0, 0], [3, 900], [1000] * 8])
def test_several_tokens_of_several_sequences_run_batched(num_cached_tokens: list[int]) -> None:
    """Guards against failing batched verification: GroupQueryAttention cannot run such a step."""
    assert prefers_batched(num_cached_tokens, 2, 1024, decode_is_faster=False)


@pytest.mark.parametrize(
    ("num_cached_tokens", "slots", "decode_is_faster", "batched"),
    [
        ([400] * 8, 480, True, True),
        ([400] * 8, 480, False, False),
        ([4000] + [50] * 7, 4096, True, False),  # each short sequence would read 4096 slots
    ],
)
def test_one_token_each_takes_the_faster_form(
    num_cached_tokens: list[int], slots: int, decode_is_faster: bool, batched: bool
) -> None:
    """Guards against the slower form in decoding."""
    assert prefers_batched(num_cached_tokens, 1, slots, decode_is_faster) == batched


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "pay"),
    [(32, 4, "fp32", True), (32, 8, "fp32", False), (32, 8, "fp16", True), (0, 4, "fp32", False)],
)
def test_the_batched_form_decodes_faster_where_many_heads_share_keys_or_gqa_has_no_kernel(
    load: Callable[..., Engine], heads: int, kv_heads: int, dtype: str, pay: bool
) -> None:
    """Guards against the slower form for a model's number of query heads per KV head."""
    with load() as engine:
        known = engine.manifest
        model, kv = replace(known.model, attention_heads=heads), [replace(layer, heads=kv_heads) for layer in known.kv]
        assert batched_decode_is_faster(replace(known, model=model, kv=kv, dtype=dtype)) == pay
