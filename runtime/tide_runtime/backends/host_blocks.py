"""Pieces of host memory of one size, such as the blocks and the snapshots of a prefix cache."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.lazy_memory import LazyMemory


class HostBlocks:
    """``count`` pieces of ``size`` bytes with ids from 0 on. A piece has pages of its own, so that one call gives it back; memory
    is taken when a piece is first written.

    Attributes:
        versions: by id, a number that changes before the piece does. Another thread that reads a piece compares it before and
            after.

    Raises DeviceMemoryError when the operating system refuses the address space.
    """

    def __init__(self, count: int, size: int) -> None:
        self.piece_bytes = size
        self._stride = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._memory = LazyMemory(count * self._stride)
        self._pieces = self._memory.bytes.reshape(count, self._stride)
        self.versions = [0] * count

    def content(self, piece: int) -> NDArray[np.uint8]:
        """The bytes of a piece, [size]."""
        return self._pieces[piece, : self.piece_bytes]

    def change(self, ids: Iterable[int]) -> None:
        """Note that the pieces ``ids`` are about to be written."""
        for piece in ids:
            self.versions[piece] += 1

    def release(self, ids: Iterable[int]) -> None:
        """Give the memory of the pieces ``ids`` back to the operating system."""
        for piece in ids:
            self.versions[piece] += 1
            self._memory.give_back(piece * self._stride, (piece + 1) * self._stride)

    def close(self) -> None:
        """Give all memory back."""
        self.change(range(len(self.versions)))
        self._memory.give_back(0, self._memory.bytes.size)
