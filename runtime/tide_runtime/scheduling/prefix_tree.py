"""Which block of keys and values belongs to which text: a radix tree over token ids, one node for each block.

The tree knows ids only; `PrefixBlocks` holds the values. The end of a text that fills no whole block may have one too, a tail,
which no block continues: the next turn of a chat goes on there and computes none of its history again.

Radix trees over prefixes with eviction of the least recently used leaves: RadixAttention (Zheng et al. 2023, SGLang,
arXiv:2312.07104).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.kv_caches import BLOCK_TOKENS

_ID_BYTES = np.dtype(np.int64).itemsize
_Key = bytes | tuple[Hashable, bytes]  # a block's tokens as int64; the first block of a text has the salt beside them


class _Node:
    """One block, after the blocks of its parents. A block was used last no later than its parent."""

    __slots__ = ("block", "children", "in_heap", "key", "last_used", "parent")

    def __init__(self, parent: _Node | None, key: _Key, block: int, last_used: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.last_used = last_used
        self.children: dict[_Key, _Node] = {}
        self.in_heap = False


class PrefixTree:
    """Block ids by salt and text. Texts of different salts share no block. Not thread-safe."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_bytes = block_tokens * _ID_BYTES
        self._root = self._pinned = _Node(None, b"", -1, 0)  # pinned: `evict` leaves it alone
        self._nodes: dict[int, _Node] = {}  # by block
        # (last_used, block) of every leaf, once, and of some blocks that were leaves. An entry may be older than the block's
        # last use, never younger, so the first one that is up to date is the least recently used leaf.
        self._heap: list[tuple[int, int]] = []
        self._clock = 0

    def __len__(self) -> int:
        """The number of blocks held."""
        return len(self._nodes)

    def match(self, tokens: Sequence[int] | NDArray[np.integer], salt: Hashable) -> list[int]:
        """Ids of the longest known prefix, in order; marks them as used. The last one may be a tail, see `tokens_of`."""
        path = self._walk(self._keys(tokens, salt))
        size = self._block_bytes
        if path:
            rest = np.asarray(tokens, np.int64)[len(path) * size // _ID_BYTES :][: size // _ID_BYTES - 1].tobytes()
            tails = (path[-1].children.get(rest[:end]) for end in range(len(rest), 0, -_ID_BYTES))
            if (tail := next((node for node in tails if node is not None), None)) is not None:
                tail.last_used = self._clock
                path.append(tail)
        return [node.block for node in path]

    def tokens_of(self, ids: Sequence[int]) -> int:
        """The number of tokens of what `match` has returned."""
        if not ids:
            return 0
        key = self._nodes[ids[-1]].key  # of the first block of a text a pair: it is whole
        last = self._block_bytes if isinstance(key, tuple) else len(key)
        return ((len(ids) - 1) * self._block_bytes + last) // _ID_BYTES

    def insert(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        salt: Hashable,
        allocate: Callable[[], int | None],
        tail: bool = False,
    ) -> tuple[int, list[int]]:
        """Add the blocks of ``tokens`` that are missing, in order, until ``allocate`` returns None instead of an id.

        ``allocate`` may make room with `evict`, which leaves the known prefix of ``tokens`` alone. When it raises, the tree
        has no new blocks.

        Args:
            tail: also a last block that is not whole, after a whole one.

        Returns:
            The number of blocks that were known, and the ids of the new ones after them.
        """
        keys = self._keys(tokens, salt)
        if tail and keys and (rest := np.asarray(tokens, np.int64).tobytes()[len(keys) * self._block_bytes :]):
            keys.append(rest)
        path = self._walk(keys)
        parent = self._pinned = path[-1] if path else self._root
        new: list[int] = []
        try:
            while len(path) + len(new) < len(keys) and (block := allocate()) is not None:
                new.append(block)
        finally:
            self._pinned = self._root
            self._offer(parent)
        for key, block in zip(keys[len(path) :], new, strict=False):
            parent.children[key] = self._nodes[block] = node = _Node(parent, key, block, self._clock)
            parent = node
        self._offer(parent)
        return len(path), new

    def evict(self, count: int) -> list[int]:
        """Remove up to ``count`` blocks, always the least recently used one among those that no other block continues.

        Returns their ids.
        """
        evicted: list[int] = []
        while len(evicted) < count and self._heap:
            queued_at, block = heappop(self._heap)
            node = self._nodes[block]
            node.in_heap = False
            if node.last_used != queued_at:
                self._offer(node)
            elif not node.children and node is not self._pinned:
                assert node.parent is not None
                del node.parent.children[node.key], self._nodes[block]
                evicted.append(block)
                self._offer(node.parent)
        return evicted

    def _keys(self, tokens: Sequence[int] | NDArray[np.integer], salt: Hashable) -> list[_Key]:
        """The keys of the whole blocks of ``tokens``."""
        size = self._block_bytes
        text = np.asarray(tokens, np.int64).tobytes()
        keys: list[_Key] = [text[end - size : end] for end in range(size, len(text) + 1, size)]
        if keys:
            keys[0] = salt, text[:size]
        return keys

    def _walk(self, keys: list[_Key]) -> list[_Node]:
        """The nodes of the longest known prefix, marked as used now."""
        self._clock = now = self._clock + 1
        path: list[_Node] = []
        children = self._root.children
        for key in keys:
            node = children.get(key)
            if node is None:
                break
            node.last_used = now
            path.append(node)
            children = node.children
        return path

    def _offer(self, node: _Node) -> None:
        """Queue a leaf for eviction, unless it is queued."""
        if not node.in_heap and not node.children and node is not self._root:
            node.in_heap = True
            heappush(self._heap, (node.last_used, node.block))
