"""Kept prefixes: what is loaded is what was saved, in the right row, and released blocks give their memory back."""

import sys

import numpy as np
import pytest
from runtime.backends.cache_shapes import LOOPED, MIXED, PAGED, UNPAGED, WITH_PAIRS, fill, resident_bytes
from tide_runtime.backends import lazy_memory
from tide_runtime.backends.kv_caches import BLOCK_TOKENS, KVCaches
from tide_runtime.backends.prefix_blocks import PrefixBlocks
from tide_runtime.bundle.manifest import Manifest

linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")


@pytest.mark.parametrize("on_linux", [pytest.param(True, marks=linux), False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
@pytest.mark.parametrize("shapes", [PAGED, MIXED, UNPAGED])
def test_loaded_blocks_are_the_saved_ones(
    shapes: Manifest, dtype: type[np.generic], on_linux: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against another text's keys and values in a prefix hit: scattered ids, saved from the middle of a row."""
    monkeypatch.setattr(lazy_memory, "_ON_LINUX", on_linux)
    caches = KVCaches(shapes, dtype, 3)
    before = fill(caches)
    blocks = PrefixBlocks(caches, 9)
    blocks.save(2, 0, [7, 1])
    blocks.save(2, 2, [8, 0])
    blocks.save(0, 1, [4, 3, 2])  # neighbours in the store
    end = 4 * BLOCK_TOKENS
    blocks.load([7, 1, 8, 0], 1)
    for name, array in caches.arrays.items():
        before[name][1, :, :end] = before[name][2, :, :end]
        np.testing.assert_array_equal(array, before[name])
    blocks.load([3, 8], 2)
    for name, array in caches.arrays.items():
        np.testing.assert_array_equal(array[2, :, :BLOCK_TOKENS], before[name][0, :, 2 * BLOCK_TOKENS : 3 * BLOCK_TOKENS])
        np.testing.assert_array_equal(
            array[2, :, BLOCK_TOKENS : 2 * BLOCK_TOKENS], before[name][1, :, 2 * BLOCK_TOKENS : 3 * BLOCK_TOKENS]
        )
        np.testing.assert_array_equal(array[2, :, 2 * BLOCK_TOKENS :], before[name][2, :, 2 * BLOCK_TOKENS :])


def test_the_last_whole_block_of_a_row_can_be_kept() -> None:
    """Guards against a prefix that ends with the cache: its slots are no multiple of a block."""
    caches = KVCaches(UNPAGED, np.float32, 2)
    wanted, whole = fill(caches), caches.slots // BLOCK_TOKENS
    assert caches.slots % BLOCK_TOKENS
    blocks = PrefixBlocks(caches, whole)
    blocks.save(0, 0, range(whole))
    blocks.load(range(whole), 1)
    end = whole * BLOCK_TOKENS
    for name, array in caches.arrays.items():
        np.testing.assert_array_equal(array[1, :, :end], wanted[name][0, :, :end])
        np.testing.assert_array_equal(array[1, :, end:], wanted[name][1, :, end:])


@pytest.mark.parametrize("shapes", [PAGED, MIXED, UNPAGED])
def test_the_bytes_of_a_block_are_what_a_row_takes(shapes: Manifest) -> None:
    """Guards against files that put keys in the place of values, or into another row or block."""
    caches = KVCaches(shapes, np.float16, 2)
    wanted, blocks = fill(caches), PrefixBlocks(caches, 3)
    blocks.save(0, 0, [2, 1])
    for place, block in enumerate([2, 1]):
        blocks.write_row(1, place + 1, blocks.content(block).copy())
    for name, array in caches.arrays.items():
        wanted[name][1, :, BLOCK_TOKENS : 3 * BLOCK_TOKENS] = wanted[name][0, :, : 2 * BLOCK_TOKENS]
        np.testing.assert_array_equal(array, wanted[name])


def test_what_a_block_holds_of_another_text_can_be_cleared() -> None:
    """Guards against files with keys and values of a text that had the row before."""
    caches = KVCaches(MIXED, np.float32, 2)
    wanted, blocks = fill(caches), PrefixBlocks(caches, 2)
    blocks.save(0, 0, [0, 1])
    blocks.clear(1, 5)
    blocks.load([0, 1], 1)
    for name, array in caches.arrays.items():
        wanted[name][1, :, : BLOCK_TOKENS + 5] = wanted[name][0, :, : BLOCK_TOKENS + 5]
        wanted[name][1, :, BLOCK_TOKENS + 5 : 2 * BLOCK_TOKENS] = 0
        np.testing.assert_array_equal(array, wanted[name])


def test_blocks_hold_every_loop() -> None:
    """Guards against a prefix that is loaded into the first loop alone, or into a copy of the caches."""
    caches = KVCaches(LOOPED, np.float32, 2, loops=2)
    wanted, blocks = fill(caches), PrefixBlocks(caches, 2)
    blocks.save(0, 0, [1, 0])
    blocks.load([1, 0], 1)
    for name, array in caches.arrays.items():
        wanted[name][1, :, : 2 * BLOCK_TOKENS] = wanted[name][0, :, : 2 * BLOCK_TOKENS]
        np.testing.assert_array_equal(array, wanted[name])


def test_pairs_are_kept_with_their_second_tokens() -> None:
    """Guards against a draft head's pair at the end of a block that has another text's next token."""
    caches = KVCaches(WITH_PAIRS, np.float32, 2)
    wanted, blocks = fill(caches), PrefixBlocks(caches, 3)
    blocks.save(0, 0, [1, 0])
    blocks.save(0, 2, [2])
    blocks.load([1, 0, 2], 1)
    for name, array in caches.arrays.items():
        end = 3 * BLOCK_TOKENS - name.endswith("_2")
        wanted[name][1, :, :end] = wanted[name][0, :, :end]
        np.testing.assert_array_equal(array, wanted[name])


def test_no_blocks_are_copied_for_no_ids() -> None:
    """Guards against an error for a prompt without a known prefix, and for an engine without kept prefixes."""
    caches = KVCaches(MIXED, np.float32, 2)
    wanted = fill(caches)
    for count in (0, 2):
        blocks = PrefixBlocks(caches, count)
        blocks.save(0, 0, [])
        blocks.load([], 1)
        blocks.release([])
        blocks.close()
    assert all(np.array_equal(array, wanted[name]) for name, array in caches.arrays.items())


@linux
@pytest.mark.parametrize("shapes", [PAGED, MIXED])
def test_released_blocks_return_their_memory_and_the_others_stay(shapes: Manifest) -> None:
    """Guards against evicted prefixes that still take memory, and against eviction that clears a neighbour."""
    caches = KVCaches(shapes, np.float32, 2)
    fill(caches)
    count = 40
    blocks = PrefixBlocks(caches, 10 * count)
    held = resident_bytes()
    for start in range(0, 10 * count, count):
        blocks.save(0, 0, range(start, start + count))
    size = 10 * count * caches.block_bytes
    assert resident_bytes() - held > size * 0.9
    blocks.release([block for block in range(10 * count) if block != 5])
    assert resident_bytes() - held < size * 0.1
    blocks.load([5], 1)
    blocks.load([6], 0)
    part = slice(5 * BLOCK_TOKENS, 6 * BLOCK_TOKENS)
    for array in caches.arrays.values():
        np.testing.assert_array_equal(array[1, :, :BLOCK_TOKENS], array[0, :, part])
        assert not array[0, :, :BLOCK_TOKENS].any()


@linux
def test_closed_blocks_take_no_memory() -> None:
    """Guards against the memory of an engine that was closed but is still referred to."""
    caches = KVCaches(PAGED, np.float32, 1)
    fill(caches)
    blocks = PrefixBlocks(caches, 200)
    held = resident_bytes()
    blocks.save(0, 0, range(200))
    blocks.close()
    assert resident_bytes() - held < 20 * caches.block_bytes
