"""Growth of KV caches, and rebinding of the steps that were bound before."""

from __future__ import annotations

import numpy as np
import pytest
from runtime.conftest import MAX_SEQ_LEN
from tide_runtime import Engine
from tide_runtime.backends import kv_caches
from tide_runtime.backends.kv_caches import KVCaches
from tide_runtime.backends.onnxruntime.cpu import _KEPT_STEPS, OnnxRuntimeContext
from tide_runtime.errors import CacheFullError


@pytest.fixture(autouse=True)
def short_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with few slots, so that the small bundle's caches can grow."""
    monkeypatch.setattr(kv_caches, "_MIN_SLOTS", 1)


@pytest.fixture
def caches(engine: Engine) -> KVCaches:
    return KVCaches(engine.manifest, np.float32, 3)


def test_growing_keeps_what_was_written(caches: KVCaches) -> None:
    """Guards against lost tokens when a conversation outgrows its cache."""
    before = {name: np.random.default_rng(0).random(array.shape, np.float32) for name, array in caches.arrays.items()}
    for name, array in caches.arrays.items():
        array[:] = before[name]
    filled = caches.slots
    caches.reserve(filled + 1)
    assert filled < caches.slots <= caches.limit
    assert all(np.array_equal(array[:, :, :filled], before[name]) for name, array in caches.arrays.items())


def test_cleared_caches_are_short_again_and_grow_in_their_memory(caches: KVCaches) -> None:
    """Guards against caches that stay long after one long conversation, and against growth in place that overwrites the next
    sequence."""
    fewest, name = caches.slots, "key_cache_0"
    caches.reserve(MAX_SEQ_LEN)
    grown, generation = caches.arrays[name], caches.generation
    caches.clear()
    assert caches.slots == fewest < MAX_SEQ_LEN
    before = {n: np.random.default_rng(0).random(array.shape, np.float32) for n, array in caches.arrays.items()}
    for n, array in caches.arrays.items():
        array[:] = before[n]
    caches.reserve(MAX_SEQ_LEN)
    assert all(np.array_equal(array[:, :, :fewest], before[n]) for n, array in caches.arrays.items())
    assert np.shares_memory(caches.arrays[name], grown) and caches.generation == generation


def test_a_step_beyond_the_last_slot_is_refused(caches: KVCaches) -> None:
    """Guards against drafts written past the end of a cache."""
    caches.reserve(MAX_SEQ_LEN)
    assert caches.slots == MAX_SEQ_LEN
    with pytest.raises(CacheFullError, match=f"ends at slot {MAX_SEQ_LEN + 1}.*has {MAX_SEQ_LEN}.*--max-seq-len"):
        caches.reserve(MAX_SEQ_LEN + 1)
    assert caches.slots == MAX_SEQ_LEN


@pytest.mark.parametrize("lengths", [[MAX_SEQ_LEN - 2, 0], [0, MAX_SEQ_LEN - 2]])
def test_place_refuses_sequences_that_would_overflow(engine: Engine, lengths: list[int]) -> None:
    """Guards against a check of any but the longest sequence."""
    step = engine.backend.context(2).step(0, [4, 4])
    with pytest.raises(CacheFullError):
        step.place(lengths)


def test_steps_go_back_to_short_caches(engine: Engine) -> None:
    """Guards against steps that keep writing to the long caches."""
    graphs = [segment.name for segment in engine.manifest.segments]

    def run(context: OnnxRuntimeContext, counts: list[int], lengths: list[int]) -> np.ndarray:
        step = context.step(0, counts, counts)
        step.input_ids[: sum(counts)] = np.arange(sum(counts))
        step.place(lengths)
        for graph in graphs:
            step.run(graph)
        return step.logits[: sum(counts)].copy()

    context = engine.backend.context(2)
    context.step(0, [1]).place([MAX_SEQ_LEN - 1])
    run(context, [2, 1], [0, 0])  # bound while they are long
    context.clear()
    for own in (context, fresh := engine.backend.context(2)):
        run(own, [2, 1], [0, 0])
    np.testing.assert_array_equal(run(context, [3, 3], [2, 1]), run(fresh, [3, 3], [2, 1]))  # bound while they are short


def test_a_single_sequence_never_copies_its_cache(engine: Engine) -> None:
    """Guards against growth for a single chat, whose attention does not read empty slots."""
    assert KVCaches(engine.manifest, np.float32, 1).slots == MAX_SEQ_LEN


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("seq", [1, 3])
def test_a_step_goes_on_after_another_made_the_caches_grow(engine: Engine, seq: int, dropped: bool) -> None:
    """Guards against bindings to the replaced arrays and masks of their size, also in steps that the context has dropped."""
    graphs = [segment.name for segment in engine.manifest.segments]

    def run(grow: bool) -> np.ndarray:
        context = engine.backend.context(3)
        step = context.step(0, [seq, seq], [seq, seq])
        for turn in range(3):
            start = 4 + turn * seq
            if turn == 2:  # reads what the previous turn wrote
                step = context.step(0, [seq, seq], [seq, seq])
            step.input_ids[:] = np.arange(2 * seq) + start
            step.place([start, start - 4])
            if grow and turn == 1:
                for other in range(1, 1 + dropped * 2 * _KEPT_STEPS):
                    context.step(0, [other])
                context.step(2, [1]).place([MAX_SEQ_LEN - 1])  # placed, not run: only the caches change
            for graph in graphs:
                step.run(graph)
        return step.logits.copy()

    np.testing.assert_allclose(run(grow=True), run(grow=False), rtol=0, atol=1e-5)
