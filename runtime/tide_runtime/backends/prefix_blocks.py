"""Keys and values of kept prefixes, in blocks of BLOCK_TOKENS tokens that are copied out of cache rows and into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.host_blocks import HostBlocks
from tide_runtime.backends.kv_caches import BLOCK_TOKENS, KVCaches
from tide_runtime.backends.step_arrays import RowEnds


class _CacheBlocks(NamedTuple):
    """``cached``: a cache, [heads, rows, blocks of a row, tokens, head_dim], or [heads, rows, slots, head_dim] of ``pairs``.
    ``block_data``: its part of the blocks, [heads, blocks, tokens, head_dim]."""

    cached: NDArray[np.generic]
    block_data: NDArray[np.generic]
    pairs: bool

    def place(self, first: int, count: int) -> slice | NDArray[np.intp]:
        """The slots of ``count`` blocks of a row, from number ``first`` on."""
        return _pair_slots(first, count) if self.pairs else slice(first, first + count)


class PrefixBlocks(HostBlocks):
    """``blocks`` blocks with ids from 0 on. A block holds all layers in one piece.

    A draft head's pair belongs to the block of its second token, as a block may go on with another one: these caches are kept one
    slot earlier, and the pair of a prefix's last token is not kept.

    Args:
        ends: told how far `load` fills a row, so that no padding lands there.

    Attributes:
        layout: what the bytes of a block are.

    Raises DeviceMemoryError when the operating system refuses the address space.
    """

    def __init__(self, caches: KVCaches, blocks: int, ends: RowEnds | None = None) -> None:
        super().__init__(blocks, caches.block_bytes)
        self._ends = ends
        self._copies: list[_CacheBlocks] = []
        self.layout = f"blocks of {BLOCK_TOKENS} tokens"
        offset = 0
        for name, array in caches.arrays.items():
            rows, heads, slots, head_dim = array.shape
            pairs = name in caches.pairs
            whole = slots // BLOCK_TOKENS
            self.layout += f", {name}{' of pairs' * pairs} {array.dtype.str} [{heads}, {head_dim}]"
            cached = array.swapaxes(0, 1)
            if not pairs:
                cached = cached[:, :, : whole * BLOCK_TOKENS].reshape(heads, rows, whole, BLOCK_TOKENS, head_dim)
            size = heads * BLOCK_TOKENS * head_dim
            piece = self._pieces[:, offset : offset + size * array.itemsize]
            block_data = piece.view(array.dtype).reshape(blocks, heads, BLOCK_TOKENS, head_dim).swapaxes(0, 1)
            self._copies.append(_CacheBlocks(cached, block_data, pairs))
            offset += size * array.itemsize

    def save(self, row: int, first: int, ids: Sequence[int]) -> None:
        """Copy the blocks ``first``, ``first`` + 1, … of ``row`` (slots from ``first`` × BLOCK_TOKENS on) into ``ids``."""
        self.change(ids)
        index = np.asarray(ids, np.intp)
        for one in self._copies:
            one.block_data[:, index] = one.cached[:, row, one.place(first, len(index))]

    def load(self, ids: Sequence[int], row: int) -> None:
        """Copy the blocks ``ids`` into ``row``, from slot 0 on."""
        index = np.asarray(ids, np.intp)
        for one in self._copies:
            one.cached[:, row, one.place(0, len(index))] = one.block_data[:, index]
        self.reach(row, len(index))

    def write_row(self, row: int, block: int, content: NDArray[np.uint8]) -> None:
        """Copy the bytes of a block into the slots from ``block`` × BLOCK_TOKENS of ``row`` on."""
        offset = 0
        for one in self._copies:
            heads, _, tokens, head_dim = one.block_data.shape
            size = heads * tokens * head_dim * one.block_data.itemsize
            part = content[offset : offset + size].view(one.block_data.dtype).reshape(heads, 1, tokens, head_dim)
            one.cached[:, row, one.place(block, 1)] = part
            offset += size

    def clear(self, block: int, tokens: int) -> None:
        """Zero what ``block`` holds after its first ``tokens``."""
        for one in self._copies:
            one.block_data[:, block, tokens:] = 0

    def reach(self, row: int, blocks: int) -> None:
        """Say that ``row`` is filled up to so many blocks."""
        if self._ends is not None:
            self._ends.reach(row, blocks * BLOCK_TOKENS)

    def close(self) -> None:
        self._copies.clear()
        super().close()


def _pair_slots(first: int, count: int) -> NDArray[np.intp]:
    """[count, BLOCK_TOKENS] slots of the pairs whose second tokens are in ``count`` blocks from number ``first`` on; in the place
    before the first pair, slot 1 once more."""
    return np.abs(np.arange(first * BLOCK_TOKENS - 1, (first + count) * BLOCK_TOKENS - 1)).reshape(count, BLOCK_TOKENS)
