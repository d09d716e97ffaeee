"""The prefix cache: which texts are kept in memory and on disk, and what is copied between that memory and rows."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from tide_runtime.backends.kv_caches import BLOCK_TOKENS, blocks_of
from tide_runtime.scheduling.prefix_disk import MAX_DISK_BLOCKS_PER_STEP, PrefixDisk
from tide_runtime.scheduling.prefix_tree import PrefixTree
from tide_runtime.scheduling.snapshot_tree import Evicted, Place, SnapshotTree
from tide_runtime.sequence import TokenSequence


class Copies(NamedTuple):
    """What is to be copied between ``row`` and the prefix cache: the row's blocks from ``first`` on, which are ``ids`` there, and
    the states of recurrent layers, ``slot`` there, where there are any."""

    row: int
    first: int
    ids: list[int]
    slot: int | None = None


class PrefixCache:
    """What an engine keeps of texts.

    Args:
        tree: with snapshots for recurrent models; None: prompts are always computed whole.
        disk: where prefixes are that the tree does not have; None: nowhere.
        blocks: blocks of KV memory in all.
        slots: most tokens of a row.
        most: blocks of the tree; None: all.

    Attributes:
        free: blocks of KV memory that neither rows nor the tree hold.
    """

    def __init__(
        self, tree: PrefixTree | None, disk: PrefixDisk | None, blocks: int, slots: int, most: int | None = None
    ) -> None:
        self.tree = tree
        self.disk = disk
        self.free = blocks
        self._slots = slots
        self._free_ids = list(range((blocks if most is None else most) - 1, -1, -1)) if tree is not None else []
        snapshots = blocks // tree.snapshot_blocks if isinstance(tree, SnapshotTree) else 0
        self._free_slots = list(range(snapshots - 1, -1, -1))
        self._evicted = Evicted([], [])  # and not used again so far

    @property
    def blocks(self) -> int:
        """Blocks of KV memory that the tree holds."""
        return len(self.tree) if self.tree is not None else 0

    @property
    def snapshots(self) -> int:
        return self.tree.snapshots if isinstance(self.tree, SnapshotTree) else 0

    def load(self, sequence: TokenSequence) -> Copies | None:
        """Take the longest kept prefix of a text over into its row; None where there is none."""
        if self.tree is None or not sequence.params.use_prefix_cache:
            return None
        text = sequence.tokens[: sequence.logits_from]
        salt = _salt(sequence)
        slot: int | None = None
        if isinstance(self.tree, SnapshotTree):
            ids, slot, cached, shared = self.tree.deepest(text, salt)
            sequence.snapshot_points = snapshot_points(sequence, cached, shared)
        else:
            ids = self.tree.match(text, salt)
            cached = self.tree.tokens_of(ids)
        if not cached:
            return None
        _set_cached(sequence, cached)
        return Copies(sequence.batch_index, 0, ids, slot)

    def is_on_disk(self, sequence: TokenSequence) -> bool:
        """Whether the disk may have more of a prefix than the row."""
        if self.disk is None or not _may_be_on_disk(sequence):
            return False
        return self.disk.has_more(sequence.tokens[: sequence.logits_from], _salt(sequence), sequence.num_cached_tokens)

    def recall(self, sequence: TokenSequence, beside: bool) -> bool:
        """Read what the disk has of a text's prefix into its row; ``beside`` decodes only some blocks. Whether there may be
        more."""
        assert self.disk is not None
        tokens = sequence.tokens[: sequence.logits_from]
        most = MAX_DISK_BLOCKS_PER_STEP if beside else math.inf
        cached, more = self.disk.recall(tokens, _salt(sequence), sequence.num_cached_tokens, sequence.batch_index, most)
        _set_cached(sequence, cached)
        return more

    def save(self, sequence: TokenSequence, reusable: int) -> Copies | None:
        """Keep the first ``reusable`` tokens of a text that has a row; where the model is recurrent only at its snapshot points
        and at its end.

        Returns what is to be copied out of the row; None where there is nothing new.
        """
        if self.tree is None or not sequence.params.use_prefix_cache:
            return None
        if isinstance(self.tree, SnapshotTree):
            ends = sequence.num_cached_tokens in sequence.snapshot_points or sequence.finish_reason is not None
            return self._save_snapshot(sequence, self.tree) if ends and reusable == sequence.num_cached_tokens else None
        tokens = sequence.tokens[: min(reusable, sequence.num_tokens)]  # accepted drafts may stand behind the end of the text
        # The next turn of a chat goes on where this text ends. A block that reaches beyond the row cannot be copied.
        tail = sequence.finish_reason is not None and blocks_of(len(tokens)) * BLOCK_TOKENS <= self._slots
        known, ids = self.tree.insert(tokens, _salt(sequence), self._allocate, tail)
        return Copies(sequence.batch_index, known, ids) if ids else None

    def store(self, sequence: TokenSequence) -> None:
        """Have what the tree holds of a text written to the disk."""
        if self.disk is not None and self.tree is not None and _may_be_on_disk(sequence):
            self.disk.store(self.tree, sequence.tokens[: sequence.num_tokens], _salt(sequence))

    def make_room(self, blocks: int, spared: Place | None = None) -> bool:
        """Give up what was used least recently until ``blocks`` are free, or nothing is left. Whether they are.

        ``spared``: see `SnapshotTree.evict_snapshots`.
        """
        if blocks > self.free and self.tree is not None:
            missing = blocks - self.free
            if isinstance(self.tree, SnapshotTree):
                evicted = self.tree.evict_snapshots(missing, spared)
                self.free += self.tree.snapshot_blocks * len(evicted.slots)
            else:
                evicted = Evicted(self.tree.evict(missing), [])
            self.free += len(evicted.ids)
            self._evicted.ids.extend(evicted.ids)
            self._evicted.slots.extend(evicted.slots)
        return blocks <= self.free

    def drop(self) -> None:
        """Keep nothing from now on, and forget what was kept."""
        self.free += self.blocks
        self.tree = None

    def released(self) -> Evicted:
        """What was given up since the last call: the backend may give its memory back."""
        released = self._evicted
        self._evicted = Evicted([], [])
        self._free_ids += released.ids
        self._free_slots += released.slots
        return released

    def _save_snapshot(self, sequence: TokenSequence, tree: SnapshotTree) -> Copies | None:
        tokens = sequence.tokens[: sequence.num_cached_tokens]
        if len(tokens) < BLOCK_TOKENS or blocks_of(len(tokens)) * BLOCK_TOKENS > self._slots:
            return None  # too few to be worth it, or in a block that reaches beyond the row
        place = tree.place(tokens, _salt(sequence))
        if place is None:
            return None
        needed = place.missing + tree.snapshot_blocks
        if not self.make_room(needed, place):
            return None
        self.free -= needed
        ids = [(self._evicted.ids or self._free_ids).pop() for _ in range(place.missing)]
        slot = (self._evicted.slots or self._free_slots).pop()
        tree.keep(place, ids, slot)
        return Copies(sequence.batch_index, place.num_cached, ids, slot)

    def _allocate(self) -> int | None:
        """A block for a text: a free one, else the one that was used least recently."""
        assert self.tree is not None
        if self.free > 0 and self._free_ids:
            self.free -= 1
            return self._free_ids.pop()
        evicted = self.tree.evict(1)
        return evicted[0] if evicted else None


def snapshot_points(sequence: TokenSequence, cached: int, shared: int) -> list[int]:
    """Numbers of tokens after which a prefill stops for a snapshot, rising.

    It stops after the first message, which other chats may begin with, after the last one, from which the chat goes on even where
    the template drops parts of replies, and after the ``shared`` tokens that other texts begin with too. Messages end where a
    token ends replies. The row has the first ``cached`` tokens.

    A stop takes about as long as a decode, so it must spare later texts a block at least.
    """
    ends = np.flatnonzero(np.isin(sequence.tokens[: sequence.prompt_tokens - 1], list(sequence.eos))) + 1
    points = list[int]()
    before = cached
    for point in sorted({*ends[:1].tolist(), *ends[-1:].tolist(), min(shared, sequence.prompt_tokens - 1)}):
        if point >= before + BLOCK_TOKENS:
            points.append(point)
            before = point
    return points


def _set_cached(sequence: TokenSequence, cached: int) -> None:
    """The row of a text has its first ``cached`` tokens."""
    sequence.num_cached_tokens = cached
    if sequence.num_tokens == sequence.prompt_tokens:
        sequence.history.prefix_tokens = cached


def _salt(sequence: TokenSequence) -> Hashable:
    """What texts that share blocks of the prefix cache have in common: also the factors that their keys are rotated by."""
    return sequence.salt, sequence.is_long


def _may_be_on_disk(sequence: TokenSequence) -> bool:
    """Salted texts are not; `prefix_disk` says why."""
    return sequence.params.use_prefix_cache and sequence.params.cache_salt is None
