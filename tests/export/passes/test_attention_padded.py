"""Padded attention of several packed sequences against GroupQueryAttention of each sequence alone."""

from collections.abc import Sequence

import numpy as np
import pytest
from export.passes.graphs import SLOTS, lowered, operators, run
from export.passes.group_query import GroupQuery, step

from tide_export.passes.attention_padded import pad_attention

ATTENTIONS = {
    "three query heads a KV head": GroupQuery(),
    "one KV head": GroupQuery(heads=7, kv_heads=1),
    "multi-head": GroupQuery(heads=3, kv_heads=3),
    "packed projections": GroupQuery(projections="packed"),
    "interleaved": GroupQuery(interleaved=True),
    "partial rotary": GroupQuery(dim=32, rotary_width=16),
    "no rotary": GroupQuery(rotary_width=0),
    "window": GroupQuery(window=5),
    "soft-cap": GroupQuery(softcap=2.0),
    "half precision": GroupQuery(dtype="float16"),
    "sinks": GroupQuery(sinks=True),
    "sinks and window": GroupQuery(sinks=True, window=7),
    "sinks, one KV head": GroupQuery(heads=7, kv_heads=1, sinks=True),
    "sinks, multi-head": GroupQuery(heads=3, kv_heads=3, sinks=True),
}
INT8 = {
    "int8 caches": GroupQuery(int8=True),
    "int8 caches, packed projections": GroupQuery(int8=True, projections="packed"),
    "int8 caches, interleaved": GroupQuery(int8=True, interleaved=True),
    "int8 caches, no rotary": GroupQuery(int8=True, rotary_width=0, heads=2),
    "int8 caches, sinks and window": GroupQuery(int8=True, sinks=True, window=7),
    "int8 caches, soft-cap": GroupQuery(int8=True, softcap=2.0),
    "int8 caches, half precision": GroupQuery(int8=True, dtype="float16"),
}
LENGTHS = (3, 17, 0)  # filled slots of each sequence
PADDED = ATTENTIONS | INT8
COUNTS = ([1, 1, 1], [7, 3, 5], [2, 0, 4])  # tokens of each sequence
TOLERANCE = {"float": 2e-6, "float16": 4e-3}  # of the largest number


def packed_feeds(
    attention: GroupQuery, alone: list[dict[str, np.ndarray]], counts: list[int], lengths: Sequence[int] = LENGTHS
) -> dict[str, np.ndarray]:
    """The tokens of ``alone`` packed sequence after sequence, and the index inputs."""
    longest, starts = max(2, *counts), np.cumsum([0, *counts[:-1]])
    place = np.arange(longest)
    feeds = {name: np.concatenate([feeds[name] for feeds in alone]) for name in ("key_cache_0", "value_cache_0")}
    feeds["hidden"] = np.concatenate([one["hidden"][0, :n] for one, n in zip(alone, counts, strict=True)])[None]
    last = feeds["hidden"].shape[1] - 1
    padded_from = np.stack([np.clip(start + np.minimum(place, n - 1), 0, last) for start, n in zip(starts, counts, strict=True)])
    packed_from = np.concatenate([b * longest + np.arange(n) for b, n in enumerate(counts)])[None]
    feeds["padded_rows"] = np.stack([np.zeros_like(padded_from), padded_from], -1)
    feeds["packed_rows"] = np.stack(np.divmod(packed_from, longest), -1)
    feeds["padded_position_ids"] = np.array(lengths)[:, None] + place
    feeds["write_index"] = np.array(lengths)
    feeds["query_seqlens"] = np.array([max(2, n) if n else 0 for n in counts], np.int32)
    feeds["total_sequence_length"] = np.array(SLOTS, np.int32)
    return feeds


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("name", PADDED)
def test_sequences_together_are_sequences_alone(name, counts):
    """A request's text would depend on the requests it shares a batch with."""
    attention = PADDED[name]
    before = attention.graph()
    after, report = lowered(pad_attention, before)
    assert report.applied == 1
    alone = [step(before, [length], max(1, count), seed=length) for length, count in zip(LENGTHS, counts, strict=True)]
    together = run(after, packed_feeds(attention, alone, counts))
    tolerance, first = TOLERANCE[attention.dtype], 0
    for sequence, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        if count:
            expected = run(before, alone[sequence])
            scale = np.abs(expected["y"]).max()
            np.testing.assert_allclose(together["y"][0, first : first + count], expected["y"][0], rtol=0, atol=tolerance * scale)
            for cache in ("key_cache_out_0", "value_cache_out_0"):
                found, wanted = (
                    values[:, : length + count].astype(np.float32) for values in (together[cache][sequence], expected[cache][0])
                )
                np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * max(1, np.abs(wanted).max()))
        first += count


@pytest.mark.parametrize("name", PADDED)
def test_padded_attention_has_the_same_bits_in_company(name):
    """A draft would be verified with other logits than those of a token alone, and a text would depend on its company."""
    attention = PADDED[name]
    after, _ = lowered(pad_attention, attention.graph())
    alone = [step(attention.graph(), [length], 6, seed=length) for length in LENGTHS]
    expected = [
        run(after, packed_feeds(attention, [feeds], [6], [length]))["y"][0] for feeds, length in zip(alone, LENGTHS, strict=True)
    ]
    for counts in ([1, 1, 1], [2, 1, 3], [6, 5, 1]):
        together, first = run(after, packed_feeds(attention, alone, counts))["y"][0], 0
        for rows, count in zip(expected, counts, strict=True):
            assert together[first : first + count].tobytes() == rows[:count].tobytes()
            first += count


@pytest.mark.parametrize("name", PADDED)
def test_the_kernel_stays_where_attention_is_padded(name):
    """A step would read all slots of its caches, int8 ones as floats, and sum in another order than alone."""
    after, _ = lowered(pad_attention, PADDED[name].graph())
    found = operators(after)
    assert found["GroupQueryAttention"] == 1 and not found["TensorScatter"] and not found["Softmax"]
    assert {value.name for value in after.graph.inputs} == {
        *("hidden", "key_cache_0", "value_cache_0", "write_index", "padded_rows", "packed_rows", "query_seqlens"),
        "total_sequence_length",
    }
