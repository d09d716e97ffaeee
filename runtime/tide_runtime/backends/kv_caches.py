"""KV caches in host memory: rows of a fixed number of slots, of which only the written pages take physical memory.

A cache then grows with its text without a copy, and attention reads it as one contiguous array (the idea of vAttention, Prabhu
et al. 2024, arXiv:2405.04437, with the pages of the operating system in place of the GPU driver's).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.lazy_memory import LazyMemory
from tide_runtime.bundle.layer_info import KVInfo
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.errors import CacheFullError

BLOCK_TOKENS = 16  # tokens of a block, the unit in which the memory of a text is counted and its prefixes are kept
_MAX_ADDED = 8  # slots are rounded up by at most 1/8, because batched attention reads every slot
_CLEANED_SLOTS = 128  # slots that are searched for NaN at a time where memory cannot be given back


def blocks_of(tokens: int) -> int:
    """Blocks that hold ``tokens``."""
    return -(-tokens // BLOCK_TOKENS)


class KVCaches:
    """Caches of ``rows`` sequences.

    Args:
        spare_slots: slots beyond max_seq_len, which steps pad into.
        loops: how often the model runs its layers, where a row's caches of all loops are to lie side by side; else 1.
        of_draft_head: also the cache of the draft head, if it has one.

    Attributes:
        arrays: name (``key_cache_i``, ``value_cache_i``) → [rows, heads, slots, head_dim], of ``loops`` more than 1 a single row
            of which is contiguous, else all. The arrays are never replaced, so bindings to them stay valid until `close`.
        by_loop: the same memory, of the layers of the first loop: name → [rows · loops, heads, slots, head_dim], contiguous; row
            r · loops + n has the n-th loop's keys and values of row r.
        pairs: names of a draft head's caches, slot p of which depends on token p + 1 too.
        limit: slots that a step may write, max_seq_len + spare_slots.
        slots: ``limit``, rounded up to whole pages for each row where few slots make up the difference.
        block_bytes: bytes of BLOCK_TOKENS tokens over all layers.

    Raises DeviceMemoryError when the operating system refuses the address space.
    """

    def __init__(
        self,
        manifest: Manifest,
        dtype: type[np.generic],
        rows: int,
        spare_slots: int = 0,
        loops: int = 1,
        of_draft_head: bool = True,
    ) -> None:
        itemsize = np.dtype(dtype).itemsize
        layers = len(manifest.layers) // loops
        shapes = {
            f"{kind}_cache_{layer}": (kv.heads, head_dim)
            for layer, kv in (manifest.caches if of_draft_head else manifest.kv).items()
            if layer < layers or loops == 1  # beside rows of loops no draft head guesses
            for kind, head_dim in (("key", kv.key_dim), ("value", kv.value_dim))
        }
        slot_bytes = {name: heads * head_dim * itemsize for name, (heads, head_dim) in shapes.items()}
        self.limit = manifest.max_seq_len + spare_slots
        self.slots = _whole_pages(self.limit, slot_bytes.values())
        self.block_bytes = BLOCK_TOKENS * sum(slot_bytes.values()) * loops
        self._loops = loops
        self._memory = {name: LazyMemory(rows * loops * self.slots * size) for name, size in slot_bytes.items()}
        self.by_loop: dict[str, NDArray[np.generic]] = {
            name: self._memory[name].bytes.view(dtype).reshape(rows * loops, heads, self.slots, head_dim)
            for name, (heads, head_dim) in shapes.items()
        }
        self.arrays: dict[str, NDArray[np.generic]] = {
            f"{kind}_{int(layer) + loop * layers}": array[loop::loops]
            for loop in range(loops)
            for name, array in self.by_loop.items()
            for kind, _, layer in (name.rpartition("_"),)
        }
        of_head = {f"{kind}_cache_{layer}" for kind in ("key", "value") for layer in manifest.caches.keys() - manifest.kv.keys()}
        self.pairs = of_head & self.arrays.keys()

    def release(self, row: int) -> None:
        """Give the physical memory of ``row`` back to the operating system; its slots are zero afterwards.

        Where memory cannot be given back, the slots keep their values, and those of a failed request, NaN or infinite, become
        zero: masked attention multiplies unused slots by 0, which does not hide them.
        """
        for name, array in self.by_loop.items():
            own = array[row * self._loops : (row + 1) * self._loops]
            if not self._memory[name].give_back(row * own.nbytes, (row + 1) * own.nbytes):
                for values in own:
                    _clean(values)

    def move_row(self, source: int, target: int, num_cached_tokens: int) -> None:
        """Copy the cached tokens of row ``source`` to row ``target``, in every layer."""
        for array in self.arrays.values():
            array[target, :, :num_cached_tokens] = array[source, :, :num_cached_tokens]

    def close(self) -> None:
        """Give all physical memory back. Address space is freed with the last array or binding that refers to it."""
        self.arrays.clear()
        self.by_loop.clear()
        for memory in self._memory.values():
            memory.give_back(0, memory.bytes.size)
        self._memory.clear()


def kv_bytes_per_token(caches: Mapping[int, KVInfo], itemsize: int) -> int:
    """Bytes of keys and values of one token over all ``caches``."""
    return sum(kv.heads * (kv.key_dim + kv.value_dim) for kv in caches.values()) * itemsize


def cache_full(needed: int, limit: int) -> CacheFullError:
    """The error of a step that needs ``needed`` slots of ``limit``."""
    return CacheFullError(
        f"a step ends at slot {needed}, the KV cache has {limit}; give a step fewer tokens near the end of the "
        f"cache, or export with --max-seq-len {needed} or more"
    )


def _whole_pages(slots: int, slot_bytes: Iterable[int]) -> int:
    """``slots``, rounded up so that rows of all arrays begin on a page, unless that adds more than one slot in _MAX_ADDED."""
    step = lcm(*(mmap.PAGESIZE // gcd(mmap.PAGESIZE, size) for size in slot_bytes if size))
    rounded = -(-slots // step) * step
    return rounded if rounded - slots <= slots // _MAX_ADDED else slots


def _clean(values: NDArray[np.generic]) -> None:
    """Write zeros over NaN and infinity in ``values`` [heads, slots, head_dim].

    Slots are written in order, so the search ends at slots that are all zero: reading on would back the unused pages.
    """
    for start in range(0, values.shape[1], _CLEANED_SLOTS):
        part = values[:, start : start + _CLEANED_SLOTS]
        if not part.any():
            return
        with np.errstate(all="ignore"):
            if not np.isfinite(part.sum()):
                part[...] = 0
