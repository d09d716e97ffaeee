"""The prefix tree against a dictionary of all known prefixes, searched in full for every request."""

import tracemalloc
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tide_runtime.scheduling.prefix_tree import PrefixTree

BLOCK, CAPACITY = 3, 7
Text = tuple[str | None, tuple[int, ...]]  # salt, and tokens of whole blocks, or of such and a tail
texts = st.lists(st.integers(0, 1), max_size=4 * BLOCK + 1)
salts = st.sampled_from([None, "", "a"])


class KnownPrefixes:
    """The same bookkeeping without a tree: every known prefix with its block and the time of its last use."""

    def __init__(self) -> None:
        self.blocks: dict[Text, int] = {}
        self.last_used: dict[Text, int] = {}
        self._now = 0

    def prefixes(self, tokens: list[int], salt: str | None, tail: bool) -> list[Text]:
        ends = [*range(BLOCK, len(tokens) + 1, BLOCK)]
        if tail and ends and ends[-1] < len(tokens):
            ends.append(len(tokens))
        return [(salt, tuple(tokens[:end])) for end in ends]

    def match(self, tokens: list[int], salt: str | None) -> list[Text]:
        known = self.use(tokens, salt, tail=False)
        if known:
            whole = len(known) * BLOCK
            ends = range(whole + 1, min(whole + BLOCK, len(tokens) + 1))
            tails = [text for end in ends if (text := (salt, tuple(tokens[:end]))) in self.blocks]
            for text in tails[-1:]:
                self.last_used[text] = self._now
                known.append(text)
        return known

    def use(self, tokens: list[int], salt: str | None, tail: bool) -> list[Text]:
        self._now += 1
        known: list[Text] = []
        for text in self.prefixes(tokens, salt, tail):
            if text not in self.blocks:
                break
            known.append(text)
            self.last_used[text] = self._now
        return known

    def add(self, text: Text, block: int) -> None:
        self.blocks[text], self.last_used[text] = block, self._now

    def evict(self, number: int, pinned: Text | None = None) -> list[int]:
        evicted = []
        for _ in range(number):
            parents = {(salt, tokens[: (len(tokens) - 1) // BLOCK * BLOCK]) for salt, tokens in self.blocks}
            leaves = [text for text in self.blocks if text not in parents and text != pinned]
            if not leaves:
                break
            oldest = min(leaves, key=self.last_used.__getitem__)
            del self.last_used[oldest]
            evicted.append(self.blocks.pop(oldest))
        return evicted


class TreeAndModel(RuleBasedStateMachine):
    """An owner of CAPACITY blocks, which makes room by eviction in the middle of `insert` or gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.tree, self.model, self.free = PrefixTree(BLOCK), KnownPrefixes(), list(range(CAPACITY))

    @rule(tokens=texts, salt=salts, as_array=st.booleans())
    def match(self, tokens: list[int], salt: str | None, as_array: bool) -> None:
        wanted = self.model.match(tokens, salt)
        ids = self.tree.match(np.array(tokens, np.int32) if as_array else tokens, salt)
        assert ids == [self.model.blocks[text] for text in wanted]
        assert self.tree.tokens_of(ids) == (len(wanted[-1][1]) if wanted else 0)

    @rule(tokens=texts, salt=salts, evicts=st.integers(0, 2), most=st.integers(0, 5), tail=st.booleans())
    def insert(self, tokens: list[int], salt: str | None, evicts: int, most: int, tail: bool) -> None:
        known = self.model.use(tokens, salt, tail)
        allocated: list[int] = []

        def allocate() -> int | None:
            if len(allocated) == most:
                return None
            if not self.free:
                evicted = self.tree.evict(evicts)
                assert evicted == self.model.evict(evicts, pinned=known[-1] if known else None)
                self.free += evicted
            if not self.free:
                return None
            allocated.append(self.free.pop())
            return allocated[-1]

        before, new = self.tree.insert(tokens, salt, allocate, tail)
        assert (before, new) == (len(known), allocated)
        missing = self.model.prefixes(tokens, salt, tail)[before:]
        assert len(new) == len(missing) or len(new) == most or not self.free
        for text, block in zip(missing, new, strict=False):
            self.model.add(text, block)

    @rule(number=st.integers(0, 4))
    def evict(self, number: int) -> None:
        evicted = self.tree.evict(number)
        assert evicted == self.model.evict(number)
        self.free += evicted

    @invariant()
    def every_block_is_held_once_or_free(self) -> None:
        assert len(self.tree) == len(self.model.blocks)
        assert sorted([*self.model.blocks.values(), *self.free]) == list(range(CAPACITY))


TreeAndModel.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestTreeAndModel = TreeAndModel.TestCase


def ids(start: int = 0) -> Callable[[], int]:
    counter = count(start)
    return lambda: next(counter)


def test_a_failed_allocation_leaves_the_tree_as_it_was() -> None:
    """Guards against known blocks whose values were never saved, and against a prefix that can no longer be evicted."""
    tree = PrefixTree(1)
    tree.insert([1], None, ids())

    def fail() -> int | None:
        assert tree.evict(1) == []  # the only leaf is the prefix that is continued
        raise MemoryError

    with pytest.raises(MemoryError):
        tree.insert([1, 2, 3], None, fail)
    assert (tree.match([1, 2, 3], None), len(tree)) == ([0], 1)
    assert tree.evict(9) == [0]


def test_long_texts() -> None:
    """Guards against recursion over the blocks of a text."""
    tree, text = PrefixTree(1), np.arange(50_000)
    assert tree.insert(text, None, ids())[0] == 0
    assert len(tree.match(text, None)) == len(text) == len(tree)
    assert tree.evict(len(text)) == list(range(len(text)))[::-1]


def test_bookkeeping_does_not_grow_with_requests() -> None:
    """Guards against entries of evicted blocks, old uses or old salts that stay: 3,000 requests in 300 blocks."""
    tree, free, rng = PrefixTree(4), list(range(300)), np.random.default_rng(0)

    def allocate() -> int | None:
        if not free:
            free.extend(tree.evict(1))
        return free.pop() if free else None

    def request(number: int) -> None:
        shared = rng.integers(0, 3)  # one of three headers, and a text of its own
        tokens = [shared] * 40 + rng.integers(0, 50, rng.integers(0, 60)).tolist()
        salt = f"tenant {number}" if rng.random() < 0.2 else None
        tree.match(tokens, salt)
        if rng.random() < 0.5:
            tree.insert(tokens, salt, allocate)

    tracemalloc.start()
    try:
        for number in range(1000):
            request(number)
        settled = tracemalloc.get_traced_memory()[0]
        for number in range(1000, 3000):
            request(number)
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(tree) == 300
    assert grown < settled * 1.1
