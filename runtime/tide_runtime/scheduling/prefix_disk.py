"""The prefix cache's second level: blocks and snapshots of finished texts on disk, from which a returning prompt is read.

A key is a digest of all that decides a piece's bits: the model's files, the kernels, the policy, and the tokens from the first
one on. So a piece of another bundle, another machine or another text is never found. Pieces are read in the engine's thread,
between steps, and written by a thread of low priority, from the first token on, so that this waits for nothing.

Texts with a cache salt stay in memory. A salt keeps a tenant's texts from all who do not have it; files would outlive the process
and its tenants, and whoever can read them can tell the text from keys and values.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import threading
import warnings
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import BlockMemory, PrefixMemory, SnapshotMemory
from tide_runtime.backends.kv_caches import BLOCK_TOKENS
from tide_runtime.prefix_cache_folder import Parts, PrefixCacheFolder
from tide_runtime.scheduling.prefix_tree import PrefixTree
from tide_runtime.scheduling.snapshot_tree import SnapshotTree

MAX_DISK_BLOCKS_PER_STEP = 16  # blocks; reading them takes about as long as a prompt chunk of the same step
_FORMAT = "1"
_NICENESS = 5  # nice level of the writing thread, which then gets a quarter of a core that steps use too
_TOKEN_BYTES = np.dtype(np.int64).itemsize


class Piece(NamedTuple):
    """What a file holds: of each (memory, id) the bytes."""

    key: bytes
    places: Sequence[tuple[BlockMemory, int]]

    @property
    def content(self) -> Parts:
        return [memory.content(place) for memory, place in self.places]

    @property
    def versions(self) -> list[int]:
        return [memory.versions[place] for memory, place in self.places]


class TextKeys(NamedTuple):
    """Keys of a text's pieces.

    Args:
        root: what the keys of the first block and of snapshots before it follow.
        blocks: of the whole blocks, in order.
        tokens: the whole text, int64.
    """

    root: bytes
    blocks: list[bytes]
    tokens: bytes

    def snapshot(self, tokens: int) -> bytes:
        """Key of the snapshot after the first ``tokens``."""
        whole = tokens // BLOCK_TOKENS
        end = self.tokens[whole * BLOCK_TOKENS * _TOKEN_BYTES : tokens * _TOKEN_BYTES]
        return _digest(self.blocks[whole - 1] if whole else self.root, end, b"snapshot")


class PrefixDisk:
    """Reads and writes pieces of the prefix cache's memory, once `attach` has said where that is.

    Args:
        facts: what else than tokens decides the bits of keys, values and states.

    Attributes:
        writer: the thread that writes, once there is something to write.
    """

    def __init__(self, files: PrefixCacheFolder, facts: Sequence[str]) -> None:
        self.files, self._facts = files, facts
        self._root: bytes | None = None
        self._blocks: PrefixMemory | None = None
        self._snapshots: SnapshotMemory | None = None
        self._queue: SimpleQueue[tuple[list[Piece], list[list[int]]] | None] = SimpleQueue()
        self.writer: threading.Thread | None = None
        self._readers = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "tide-prefix-read")

    def attach(self, blocks: PrefixMemory, snapshots: SnapshotMemory | None) -> None:
        """Read into the rows of this memory, and write from it, from now on."""
        self._blocks, self._snapshots = blocks, snapshots
        layouts = [memory.layout for memory in (blocks, snapshots) if memory is not None]
        self._root = hashlib.sha256(json.dumps([_FORMAT, *layouts, *self._facts]).encode()).digest()

    def keys(self, tokens: NDArray[np.int64], salt: Hashable) -> TextKeys:
        """Keys of ``tokens``, kept apart by ``salt``."""
        assert self._root is not None  # attached
        text = np.asarray(tokens, np.int64).tobytes()
        key = root = _digest(self._root, repr(salt).encode())
        size = BLOCK_TOKENS * _TOKEN_BYTES
        blocks = list[bytes]()
        for end in range(size, len(text) + 1, size):
            key = _digest(key, text[end - size : end])
            blocks.append(key)
        return TextKeys(root, blocks, text)

    def has_more(self, tokens: NDArray[np.int64], salt: Hashable, cached: int) -> bool:
        """Whether more than the first ``cached`` tokens of a text are on disk; True before `attach`."""
        if self._root is None:
            return True
        keys = self.keys(tokens, salt)
        if self._snapshots is not None:
            return self._deepest_snapshot(keys, cached) > cached
        block = cached // BLOCK_TOKENS
        return block < len(keys.blocks) and self.files.has(keys.blocks[block])

    def recall(
        self, tokens: NDArray[np.int64], salt: Hashable, cached: int, row: int, most: float = math.inf
    ) -> tuple[int, bool]:
        """Read the prefix of a text into ``row``, which has its first ``cached`` tokens: at most so many blocks of keys and
        values; a recurrent model's text whole.

        Returns how many tokens the row has then, and whether there may be more.
        """
        keys = self.keys(tokens, salt)
        first = cached // BLOCK_TOKENS
        if self._snapshots is not None:
            length = self._deepest_snapshot(keys, cached)
            return (length if length and self._read_snapshot(keys, length, row, first) else cached), False
        end = int(min(len(keys.blocks), first + most))
        read = self._read_blocks(keys.blocks[first:end], row, first)
        return max(cached, (first + read) * BLOCK_TOKENS), 0 < read == most  # ``cached`` may end inside a block

    def store(self, tree: PrefixTree, tokens: NDArray[np.int64], salt: Hashable) -> None:
        """Have what ``tree`` holds of a text written; what is evicted before its turn is not."""
        if self._root is None:
            return
        ids = list[int]()
        snapshots = list[tuple[int, int, int]]()
        if isinstance(tree, SnapshotTree):
            ids, snapshots = tree.along(tokens, salt)
        else:
            ids = tree.match(tokens, salt)
        keys = self.keys(tokens, salt)
        pieces = [Piece(key, [(self._memory, block)]) for key, block in zip(keys.blocks, ids, strict=False)]
        for length, block, slot in snapshots:
            end = [(self._memory, block)] if length % BLOCK_TOKENS else []
            if end:  # the rest is of the text that had the row before, and that one's salt
                self._memory.clear(block, length % BLOCK_TOKENS)
            pieces.append(Piece(keys.snapshot(length), [(self._states, slot), *end]))
        if not pieces:
            return
        if self.writer is None:
            self.writer = threading.Thread(target=self._write_all, name="tide-prefix-disk", daemon=True)
            self.writer.start()
        self._queue.put((pieces, [piece.versions for piece in pieces]))

    def close(self) -> None:
        """Write what is queued, and end the threads. To be called once, before the memory is given back."""
        if self.writer is not None:
            self._queue.put(None)
            self.writer.join()
            self.writer = None
        self._readers.shutdown()

    @property
    def _memory(self) -> PrefixMemory:
        assert self._blocks is not None  # attached
        return self._blocks

    @property
    def _states(self) -> SnapshotMemory:
        assert self._snapshots is not None
        return self._snapshots

    def _deepest_snapshot(self, keys: TextKeys, cached: int) -> int:
        """Tokens of the deepest snapshot on disk of more than ``cached`` tokens, 0 where there is none."""
        depth = cached // BLOCK_TOKENS
        while depth < len(keys.blocks) and self.files.has(keys.blocks[depth]):
            depth += 1
        most = min(len(keys.tokens) // _TOKEN_BYTES, (depth + 1) * BLOCK_TOKENS - 1)
        return next((length for length in range(most, cached, -1) if self.files.has(keys.snapshot(length))), 0)

    def _read_blocks(self, keys: Sequence[bytes], row: int, first: int) -> int:
        """Read blocks into the ``first`` and the following ones of ``row``; how many before one that is not on disk.

        By as many threads as there are cores, because digests take longer than copies.
        """

        def read(key: bytes, block: int) -> bool:
            content = self.files.read(key, self._memory.piece_bytes)
            if content is not None:
                self._memory.write_row(row, block, content)
            return content is not None

        count = next((number for number, key in enumerate(keys) if not self.files.has(key)), len(keys))
        found = [*self._readers.map(read, keys[:count], range(first, first + count)), False]
        read_blocks = found.index(False)
        self._memory.reach(row, first + read_blocks)
        return read_blocks

    def _read_snapshot(self, keys: TextKeys, tokens: int, row: int, first: int) -> bool:
        """Read the states after the first ``tokens`` into ``row``, and keys and values from its ``first`` block on; False, and
        the states that it had, where a file is not whole."""
        whole = tokens // BLOCK_TOKENS
        states = self._states.piece_bytes
        end = self._memory.piece_bytes if tokens % BLOCK_TOKENS else 0
        content = self.files.read(keys.snapshot(tokens), states + end)
        read = self._read_blocks(keys.blocks[first:whole], row, first)  # in any case: a damaged file is found, and written again
        if content is None or read < whole - first:
            return False
        self._states.write_row(row, content[:states])
        if end:
            self._memory.write_row(row, whole, content[states:])
            self._memory.reach(row, whole + 1)
        return True

    # --- in the writing thread

    def _write_all(self) -> None:
        if sys.platform == "linux":  # elsewhere the call changes a whole process
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        has_warned = False
        while (queued := self._queue.get()) is not None:
            pieces, versions = queued
            try:
                for piece, before in zip(reversed(pieces), reversed(versions), strict=True):  # the last ones are evicted first
                    self.files.write(piece.key, piece.content, lambda p=piece, b=before: p.versions == b)  # type: ignore[misc]
            except OSError as error:
                if not has_warned:
                    warnings.warn(f"prefixes cannot be written to {self.files.folder} ({error})", RuntimeWarning, stacklevel=1)
                has_warned = True
            self.files.use([piece.key for piece in pieces])


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()
