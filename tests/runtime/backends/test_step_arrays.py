"""Packed and padded layouts of uneven steps."""

from tide_runtime.backends.step_arrays import Rounding, RowPadding, StepPositions, StepShape

PADDED = RowPadding(Rounding(), Rounding(spare=1))


def test_uneven_sequences_are_packed_and_padded() -> None:
    """Guards against tokens mapped to another sequence or to stale entries."""
    positions = StepPositions(StepShape.of(0, [0, 3, 2], [0, 2, 1]))
    positions.arrange([0, 3, 2], [0, 2, 1])
    packed, padded, logits = (positions.arrays[name] for name in ("packed_from", "padded_from", "logits_index"))
    assert packed.shape == (1, 6) and packed[0].tolist() == [3, 4, 5, 6, 7, 0]  # five tokens, rounded up
    assert padded.tolist() == [[0, 0, 0], [0, 1, 2], [3, 4, 4]]  # a sequence without tokens repeats another's
    assert logits[:3].tolist() == [1, 2, 4]
    positions.arrange([3, 0, 2], [1, 0, 2])
    assert packed[0].tolist() == [0, 1, 2, 6, 7, 0]
    assert padded.tolist() == [[0, 1, 2], [2, 2, 2], [3, 4, 4]]
    assert logits[:3].tolist() == [2, 3, 4] and not logits[3:].any()


def test_padded_attention_is_told_the_rows_of_each_sequence() -> None:
    """Guards against a row alone in its tile, which is summed in another order, and against padding in a cache."""
    positions = StepPositions(StepShape.of(0, [1, 4, 2], (), PADDED), PADDED.sequence)
    for counts, rows in (([1, 4, 2], [2, 5, 3]), ([4, 0, 3], [5, 0, 4])):  # one shape, whose arrays are shared
        positions.arrange(counts, ())
        assert positions.arrays["query_seqlens"].tolist() == rows
    single = StepPositions(StepShape.of(0, [1], (), PADDED), PADDED.sequence).arrays
    assert (single["query_seqlens"].tolist(), single["padded_from"].tolist()) == ([2], [[0, 0]])


def test_a_single_tokens_padding_has_its_position() -> None:
    """Guards against keys of skipped layers that are turned to the position of another token."""
    positions = StepPositions(StepShape.of(0, [1], (), PADDED), PADDED.sequence)
    positions.place([7])
    assert positions.arrays["padded_position_ids"].tolist() == [[7, 7]] and positions.arrays["write_index"].tolist() == [7]


def test_positions_of_long_texts_are_shifted_and_slots_are_not() -> None:
    """Guards against keys in other slots, or a text that is turned by the factors of its neighbour."""
    for counts, cached, offsets in (([1], [7], [24]), ([1, 1], [7, 3], [24, 0]), ([2, 0, 1], [7, 0, 3], [0, 24, 24])):
        positions = StepPositions(StepShape.of(0, counts, (), PADDED), PADDED.sequence)
        positions.arrange(counts, ())
        positions.place(cached, offsets)
        found, firsts = positions.arrays, [c + o for c, o in zip(cached, offsets, strict=True)]
        tokens = [first + n for first, count in zip(firsts, counts, strict=True) for n in range(count)]
        assert found["position_ids"][: len(tokens)].tolist() == tokens
        assert found["padded_position_ids"][:, 0].tolist() == firsts
        assert found["write_index"].tolist() == cached
        assert found["total_sequence_length"] == max(cached) + found["padded_from"].shape[1]


def test_padding_adds_no_tokens_to_an_even_step() -> None:
    """Guards against products of more rows than the batch has tokens."""
    assert StepShape.of(0, [1] * 8, [1] * 8, PADDED)[2:] == (2, True, 8, 8)


def test_a_step_that_wants_no_logits_points_to_a_token_that_exists() -> None:
    """Guards against out-of-range logits indices in steps that compute no logits."""
    positions = StepPositions(StepShape.of(0, [2, 1], ()))
    positions.arrange([2, 1], ())
    assert not positions.arrays["logits_index"].any()


def test_a_padded_launch_repeats_its_first_token() -> None:
    """Guards against padding that reads a token, a position or a logit that does not exist."""
    padding = RowPadding(Rounding(2, 2), Rounding(4, 4))
    shape = StepShape.of(0, [1], [1], padding)
    assert (shape.seq, shape.tokens, shape.outputs) == (4, 2, 2)
    positions = StepPositions(shape, padding.sequence)
    positions.arrange([1], [1])
    positions.place([7])
    arrays = positions.arrays
    assert arrays["padded_from"].tolist() == [[0, 0, 0, 0]] and arrays["packed_from"].tolist() == [[0, 0]]
    assert arrays["position_ids"].tolist() == [7, 7] and arrays["logits_index"].tolist() == [0, 0]
    assert arrays["query_seqlens"].tolist() == [4] and arrays["seqlens_k"].tolist() == [10]
