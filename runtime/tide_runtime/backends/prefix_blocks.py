"""Keys and values of kept prefixes, in blocks of BLOCK_TOKENS tokens that are copied out of cache rows and into them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.kept_pieces import KeptPieces
from tide_runtime.backends.kv_caches import BLOCK_TOKENS, KVCaches
from tide_runtime.backends.step_arrays import RowEnds


class PrefixBlocks(KeptPieces):
    """``blocks`` blocks with ids from 0 on. A block holds all layers in one piece.

    Args:
        ends: told how far `load` fills a row, so that no padding lands there.

    Attributes:
        layout: what the bytes of a block are.

    Raises DeviceMemoryError when the operating system refuses the address space.
    """

    def __init__(self, caches: KVCaches, blocks: int, ends: RowEnds | None = None) -> None:
        super().__init__(blocks, caches.block_bytes)
        self._ends = ends
        self._copies: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = []
        self.layout, offset = f"blocks of {BLOCK_TOKENS} tokens", 0
        for name, array in caches.arrays.items():
            rows, heads, slots, head_dim = array.shape
            self.layout += f", {name} {array.dtype.str} [{heads}, {head_dim}]"
            whole = slots // BLOCK_TOKENS
            # [heads, rows, blocks of a row, tokens, head_dim] and [heads, blocks, tokens, head_dim]
            cached = array[:, :, : whole * BLOCK_TOKENS].reshape(rows, heads, whole, BLOCK_TOKENS, head_dim).swapaxes(0, 1)
            size = heads * BLOCK_TOKENS * head_dim
            piece = self._pieces[:, offset : offset + size * array.itemsize]
            kept = piece.view(array.dtype).reshape(blocks, heads, BLOCK_TOKENS, head_dim).swapaxes(0, 1)
            self._copies.append((cached, kept))
            offset += size * array.itemsize

    def save(self, row: int, first: int, ids: Sequence[int]) -> None:
        """Copy the blocks ``first``, ``first`` + 1, … of ``row`` (slots from ``first`` × BLOCK_TOKENS on) into ``ids``."""
        self.change(ids)
        index = np.asarray(ids, np.intp)
        for cached, kept in self._copies:
            kept[:, index] = cached[:, row, first : first + len(index)]

    def load(self, ids: Sequence[int], row: int) -> None:
        """Copy the blocks ``ids`` into ``row``, from slot 0 on."""
        index = np.asarray(ids, np.intp)
        for cached, kept in self._copies:
            cached[:, row, : len(index)] = kept[:, index]
        self.reach(row, len(index))

    def write_row(self, row: int, block: int, content: NDArray[np.uint8]) -> None:
        """Copy the bytes of a block into the slots from ``block`` × BLOCK_TOKENS of ``row`` on."""
        offset = 0
        for cached, _ in self._copies:
            part = cached[:, row, block]
            part[...] = content[offset : offset + part.nbytes].view(part.dtype).reshape(part.shape)
            offset += part.nbytes

    def clear(self, block: int, tokens: int) -> None:
        """Zero what ``block`` holds after its first ``tokens``."""
        for _, kept in self._copies:
            kept[:, block, tokens:] = 0

    def reach(self, row: int, blocks: int) -> None:
        """Say that ``row`` is filled up to so many blocks."""
        if self._ends is not None:
            self._ends.reach(row, blocks * BLOCK_TOKENS)

    def close(self) -> None:
        self._copies.clear()
        super().close()
