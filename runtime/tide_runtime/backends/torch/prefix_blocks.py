"""Keys and values of kept prefixes in a device's memory, in blocks that are copied out of cache rows and into them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from tide_runtime.backends.device.device_step import DeviceContext
from tide_runtime.backends.kv_caches import BLOCK_TOKENS
from tide_runtime.backends.torch.stream import TorchStream

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by element size in bytes; any type is copied


class _Cache(NamedTuple):
    """``block_data``: [blocks, heads, BLOCK_TOKENS, words], the cache's part of all blocks. ``pairs``: see `PrefixBlocks`."""

    name: str
    block_data: Tensor
    pairs: bool


class TorchPrefixBlocks:
    """``blocks`` blocks with ids from 0 on, for the rows of ``context``. A block holds all layers in one piece.

    Memory is taken up to the highest id that was saved, and kept until this object is deleted.
    """

    def __init__(self, stream: TorchStream, context: DeviceContext, blocks: int) -> None:
        self._stream = stream
        self._caches = context.caches
        self._ends = context.ends
        manifest = context.backend.manifest
        entry_bytes = context.backend.cache_element.bytes
        shapes = context.caches.shapes
        of_head = {f"{kind}_cache_{layer}" for kind in ("key", "value") for layer in manifest.caches.keys() - manifest.kv.keys()}
        self._word = gcd(8, *(dim * entry_bytes for *_, dim in shapes.values()))
        self._block_bytes = BLOCK_TOKENS * entry_bytes * sum(heads * dim for _, heads, _, dim in shapes.values())
        self._memory = stream.device.reserve(blocks * self._block_bytes)
        words = stream.memory(self._memory.pointer, blocks * self._block_bytes).view(_WORDS[self._word]).view(blocks, -1)
        self._parts = list[_Cache]()
        begin = 0
        for name, (_, heads, _, dim) in shapes.items():
            width = dim * entry_bytes // self._word
            end = begin + heads * BLOCK_TOKENS * width
            self._parts.append(_Cache(name, words[:, begin:end].unflatten(1, (heads, BLOCK_TOKENS, width)), name in of_head))
            begin = end

    def save(self, row: int, first: int, ids: Sequence[int]) -> None:
        """Copy the blocks ``first``, ``first`` + 1, … of ``row`` (slots from ``first`` × BLOCK_TOKENS on) into ``ids``.

        Raises DeviceMemoryError when the device has no memory for them.
        """
        self._memory.provide([(0, (max(ids) + 1) * self._block_bytes)])

        def copy(block_data: Tensor, cached: Tensor, places: Tensor, slots: Tensor) -> None:
            blocks = cached.index_select(1, slots).unflatten(1, (len(ids), BLOCK_TOKENS))
            block_data.index_copy_(0, places, blocks.transpose(0, 1))

        self._run(row, first, ids, copy)

    def load(self, ids: Sequence[int], row: int) -> None:
        """Copy the blocks ``ids`` into ``row``, from slot 0 on. Raises DeviceMemoryError when the row gets no memory."""

        def copy(block_data: Tensor, cached: Tensor, places: Tensor, slots: Tensor) -> None:
            cached.index_copy_(1, slots, block_data.index_select(0, places).transpose(0, 1).flatten(1, 2))

        self._run(row, 0, ids, copy)
        self._ends.reach(row, len(ids) * BLOCK_TOKENS)

    def release(self, ids: Sequence[int]) -> None:
        """Do nothing: the memory serves the next blocks of these ids."""

    def _run(self, row: int, first: int, ids: Sequence[int], copy: Callable[[Tensor, Tensor, Tensor, Tensor], None]) -> None:
        """Queue ``copy`` for the part of every cache: kept blocks, row [heads, slots, words], ids and slots to copy."""
        place = self._stream.place
        count = len(ids) * BLOCK_TOKENS

        def work() -> None:
            places = torch.tensor(list(ids), device=place)
            slots = torch.arange(first * BLOCK_TOKENS, first * BLOCK_TOKENS + count, device=place)
            for name, block_data, pairs in self._parts:
                # A pair belongs to the block of its second token; in the place before the first pair, slot 1 once more.
                copy(block_data, self._row(name, row, block_data), places, (slots - 1).abs() if pairs else slots)

        with self._stream.device.lock:
            self._stream.device.use()
            self._caches.reserve(first * BLOCK_TOKENS + count, row + 1)
            self._stream.run(work)

    def _row(self, name: str, row: int, block_data: Tensor) -> Tensor:
        heads = block_data.shape[1]
        width = block_data.shape[3]
        slots = self._caches.slots
        raw = self._stream.memory(self._caches.pointer(name, row), heads * slots * width * self._word)
        return raw.view(_WORDS[self._word]).view(heads, slots, width)
