"""Keys and values of kept prefixes, in blocks of BLOCK_TOKENS tokens that are copied out of cache rows and into them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.kv_caches import BLOCK_TOKENS, KVCaches
from tide_runtime.backends.lazy_memory import LazyMemory
from tide_runtime.backends.step_arrays import RowEnds


class PrefixBlocks:
    """``blocks`` blocks with ids from 0 on. A block holds all layers in one piece of whole pages, so that one call gives it
    back; memory is taken when a block is first saved.

    A draft head's pair belongs to the block of its second token, as a block may go on with another one: these caches are kept one
    slot earlier, and the pair of a prefix's last token is not kept.

    Args:
        ends: told how far `load` fills a row, so that no padding lands there.

    Raises DeviceMemoryError when the operating system refuses the address space.
    """

    def __init__(self, caches: KVCaches, blocks: int, ends: RowEnds | None = None) -> None:
        self._ends = ends
        # Bytes from one block to the next; a page that is never written where the model has no keys and values.
        self._stride = max(1, -(-caches.block_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._memory = LazyMemory(blocks * self._stride)
        self._copies: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = []
        self._pairs: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = []
        offset = 0
        for name, array in caches.arrays.items():
            rows, heads, slots, head_dim = array.shape
            whole = slots // BLOCK_TOKENS
            # [heads, rows, blocks of a row, tokens, head_dim] and [heads, blocks, tokens, head_dim]
            cached = array[:, :, : whole * BLOCK_TOKENS].reshape(rows, heads, whole, BLOCK_TOKENS, head_dim).swapaxes(0, 1)
            size = heads * BLOCK_TOKENS * head_dim
            piece = self._memory.bytes.reshape(blocks, self._stride)[:, offset : offset + size * array.itemsize]
            kept = piece.view(array.dtype).reshape(blocks, heads, BLOCK_TOKENS, head_dim).swapaxes(0, 1)
            if name in caches.pairs:
                self._pairs.append((array.swapaxes(0, 1), kept))
            else:
                self._copies.append((cached, kept))
            offset += size * array.itemsize

    def save(self, row: int, first: int, ids: Sequence[int]) -> None:
        """Copy the blocks ``first``, ``first`` + 1, … of ``row`` (slots from ``first`` × BLOCK_TOKENS on) into ``ids``."""
        index = np.asarray(ids, np.intp)
        for cached, kept in self._copies:
            kept[:, index] = cached[:, row, first : first + len(index)]
        for cached, kept in self._pairs:
            kept[:, index] = cached[:, row, _pair_slots(first, len(index))]

    def load(self, ids: Sequence[int], row: int) -> None:
        """Copy the blocks ``ids`` into ``row``, from slot 0 on."""
        index = np.asarray(ids, np.intp)
        for cached, kept in self._copies:
            cached[:, row, : len(index)] = kept[:, index]
        for cached, kept in self._pairs:
            cached[:, row, _pair_slots(0, len(index))] = kept[:, index]
        if self._ends is not None:
            self._ends.reach(row, len(index) * BLOCK_TOKENS)

    def release(self, ids: Sequence[int]) -> None:
        """Give the memory of the blocks ``ids`` back to the operating system."""
        for block in ids:
            self._memory.give_back(block * self._stride, (block + 1) * self._stride)

    def close(self) -> None:
        """Give all memory back."""
        self._copies.clear()
        self._pairs.clear()
        self._memory.give_back(0, self._memory.bytes.size)


def _pair_slots(first: int, count: int) -> NDArray[np.intp]:
    """[count, BLOCK_TOKENS] slots of the pairs whose second tokens are in ``count`` blocks from number ``first`` on; in the place
    before the first pair, slot 1 once more."""
    return np.abs(np.arange(first * BLOCK_TOKENS - 1, (first + count) * BLOCK_TOKENS - 1)).reshape(count, BLOCK_TOKENS)
