"""The prefix cache of recurrent models against a plain list of texts: what it finds, and what goes when memory is short."""

import numpy as np
import pytest
from tide_runtime.scheduling.snapshot_tree import SnapshotTree

BLOCK, SNAPSHOT = 4, 3


class Cache:
    """A tree with memory for so many blocks, and the texts that it should know, by slot, the least recently used first."""

    def __init__(self, blocks: int) -> None:
        self.tree, self.blocks = SnapshotTree(SNAPSHOT, BLOCK), blocks
        self.ids, self.slots = set(range(blocks)), set(range(blocks))
        self.known: dict[int, tuple[str | None, tuple[int, ...]]] = {}

    def keep(self, tokens: list[int], salt: str | None = None) -> None:
        place = self.tree.place(tokens, salt)
        if place is None:
            slot = next(slot for slot, known in self.known.items() if known == (salt, tuple(tokens)))
            self.known[slot] = self.known.pop(slot)
            return
        needed = place.missing + SNAPSHOT
        free = self.blocks - len(self.tree)
        if needed > free:
            evicted = self.tree.evict_snapshots(needed - free, place)
            assert evicted.slots == list(self.known)[: len(evicted.slots)]
            for slot in evicted.slots:
                del self.known[slot]
            assert not self.ids & set(evicted.ids)
            self.ids |= set(evicted.ids)
            self.slots |= set(evicted.slots)
        if needed > self.blocks - len(self.tree):
            return
        slot = self.slots.pop()
        self.tree.keep(place, [self.ids.pop() for _ in range(place.missing)], slot)
        self.known[slot] = salt, tuple(tokens)

    def check(self, tokens: list[int], salt: str | None = None) -> None:
        fitting = [
            (len(text), slot) for slot, (own, text) in self.known.items() if own == salt and text == tuple(tokens[: len(text)])
        ]
        match = self.tree.deepest(tokens, salt)
        assert (match.tokens, match.slot) == max(fitting, default=(0, -1))
        assert len(match.ids) == -(-match.tokens // BLOCK)
        assert not self.ids & set(match.ids)
        if match.tokens:
            self.known[match.slot] = self.known.pop(match.slot)


@pytest.mark.parametrize("blocks", [12, 40, 400])
def test_as_a_list_of_texts(blocks: int) -> None:
    """Breaks: snapshots of other texts, positions or tenants; blocks that are lost or freed twice; any order but the last use."""
    random = np.random.default_rng(blocks)
    cache = Cache(blocks)
    texts: list[list[int]] = [[]]
    for _ in range(800):
        text = [*texts[random.integers(len(texts))], *random.integers(0, 3, random.integers(1, 9)).tolist()][:24]
        salt = None if random.random() < 0.8 else "tenant"
        texts = [*texts, text][-20:]
        if random.random() < 0.5:
            cache.keep(text, salt)
        else:
            cache.check(text, salt)
        assert len(cache.tree) == blocks - len(cache.ids) + SNAPSHOT * len(cache.known)
        assert cache.tree.snapshots == len(cache.known)
    assert cache.known
    cache.tree.evict_snapshots(10**6)
    assert len(cache.tree) == 0


def test_what_texts_share_is_known_without_a_snapshot() -> None:
    """Breaks: the third text with a long prefix, for which the second one takes a snapshot where they branch off."""
    cache = Cache(99)
    cache.keep([*range(10), 1])
    match = cache.tree.deepest([*range(9), 7, 7, 7], None)
    assert (match.tokens, match.shared) == (0, 8)
