"""The prefix cache of a recurrent model: texts of which a snapshot of the states is kept, beside blocks of keys and values.

A state sums up a whole text, so a prefix can be taken over only where a snapshot was taken: a match is the deepest snapshot
whose text begins the new one. The tree of blocks is that of `PrefixTree`; a snapshot may stand anywhere, so the last block of its
text may be filled in part, and belongs to it alone. Blocks live as long as a snapshot after them; snapshots go by last use.
Marconi (Pan et al. 2024, arXiv:2411.19379) keeps states where texts branch off and where they end, for the same reason.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.kv_caches import BLOCK_TOKENS
from tide_runtime.scheduling.prefix_tree import PrefixTree, _Key, _Node

_End = tuple[Hashable, bytes]  # salt and tokens after the last whole block


@dataclass(eq=False)
class _Snapshot:
    """``block``: holds the keys and values of the tokens after the last whole block, -1 where there are none."""

    node: _Node
    end: _End
    block: int
    slot: int


class Match(NamedTuple):
    """The deepest snapshot of a text: blocks to load, its slot, and its tokens; ``shared``: tokens of the whole blocks that the
    text shares with any kept one, snapshot or not."""

    ids: list[int]
    slot: int
    tokens: int
    shared: int


class Place(NamedTuple):
    """The place of a text's snapshot: after ``num_cached`` blocks of the tree; ``missing`` more, the last for ``end``."""

    node: _Node
    keys: list[_Key]
    end: _End
    num_cached: int

    @property
    def missing(self) -> int:
        return len(self.keys) + bool(self.end[1])


class Evicted(NamedTuple):
    ids: list[int]
    slots: list[int]


class SnapshotTree(PrefixTree):
    """Blocks and snapshots by salt and text. Texts of different salts share nothing. Not thread-safe.

    Args:
        snapshot_blocks: blocks of memory that a snapshot takes beside those of its keys and values.
    """

    def __init__(self, snapshot_blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        super().__init__(block_tokens)
        self.snapshot_blocks, self._block_tokens = snapshot_blocks, block_tokens
        self._snapshots: OrderedDict[int, _Snapshot] = OrderedDict()  # by slot, the least recently used first
        self._ends: defaultdict[_Node, dict[_End, _Snapshot]] = defaultdict(dict)

    def __len__(self) -> int:
        """The number of blocks held, those of snapshots included."""
        partial = sum(snapshot.block >= 0 for snapshot in self._snapshots.values())
        return len(self._nodes) + partial + self.snapshot_blocks * len(self._snapshots)

    @property
    def snapshots(self) -> int:
        """The number of snapshots held."""
        return len(self._snapshots)

    def deepest(self, tokens: Sequence[int] | NDArray[np.integer], salt: Hashable) -> Match:
        """The deepest snapshot of the text's beginnings, marked as used; one of no tokens where there is none."""
        path = self._walk(self._keys(tokens, salt))
        text = np.asarray(tokens, np.int64).tobytes()
        shared = len(path) * self._block_tokens
        for depth in range(len(path), -1, -1):
            rest = text[depth * self._block_bytes :]
            ends = self._ends.get(path[depth - 1] if depth else self._root, {})
            fitting = [one for (salted, end), one in ends.items() if salted == salt and rest.startswith(end)]
            if fitting:
                found = max(fitting, key=lambda one: len(one.end[1]))
                self._snapshots.move_to_end(found.slot)
                ids = [node.block for node in path[:depth]] + ([found.block] if found.block >= 0 else [])
                return Match(ids, found.slot, depth * self._block_tokens + len(found.end[1]) // 8, shared)
        return Match([], -1, 0, shared)

    def along(self, tokens: Sequence[int] | NDArray[np.integer], salt: Hashable) -> tuple[list[int], list[tuple[int, int, int]]]:
        """The known blocks of a text, in order, and the snapshots of its beginnings: tokens, block of the tokens after the last
        whole block (-1: none) and slot."""
        path = self._walk(self._keys(tokens, salt))
        text = np.asarray(tokens, np.int64).tobytes()
        snapshots = [
            (depth * self._block_tokens + len(end) // 8, one.block, one.slot)
            for depth, node in enumerate([self._root, *path])
            for (salted, end), one in self._ends.get(node, {}).items()
            if salted == salt and text[depth * self._block_bytes :].startswith(end)
        ]
        return [node.block for node in path], snapshots

    def place(self, tokens: Sequence[int] | NDArray[np.integer], salt: Hashable) -> Place | None:
        """The place of a snapshot of ``tokens``; None: there is one already, which is marked as used."""
        keys = self._keys(tokens, salt)
        text = np.asarray(tokens, np.int64).tobytes()
        path = self._walk(keys)
        end = (salt, text[len(keys) * self._block_bytes :])
        node = path[-1] if path else self._root
        there = self._ends.get(node, {}).get(end) if len(path) == len(keys) else None
        if there is not None:
            self._snapshots.move_to_end(there.slot)
            return None
        return Place(node, keys[len(path) :], end, len(path))

    def keep(self, place: Place, ids: Sequence[int], slot: int) -> None:
        """Add a snapshot with ``place.missing`` new blocks."""
        node = place.node
        for key, block in zip(place.keys, ids, strict=False):
            node.children[key] = self._nodes[block] = child = _Node(node, key, block, self._clock)
            node = child
        block = ids[-1] if place.end[1] else -1
        self._snapshots[slot] = self._ends[node][place.end] = _Snapshot(node, place.end, block, slot)

    def evict_snapshots(self, count: int, spared: Place | None = None) -> Evicted:
        """Remove the least recently used snapshots, and the blocks that no other one needs, until ``count`` blocks are free or
        none is left. ``spared``: its known blocks stay."""
        ids, slots = list[int](), list[int]()
        while self._snapshots and len(ids) + self.snapshot_blocks * len(slots) < count:
            slot, snapshot = self._snapshots.popitem(last=False)
            slots.append(slot)
            ids += [snapshot.block] if snapshot.block >= 0 else []
            node = snapshot.node
            ends = self._ends[snapshot.node]
            del ends[snapshot.end]
            while not node.children and not self._ends.get(node) and node.parent is not None:
                self._ends.pop(node, None)
                if spared is not None and node is spared.node:
                    break
                del node.parent.children[node.key], self._nodes[node.block]
                ids.append(node.block)
                node = node.parent
        return Evicted(ids, slots)
