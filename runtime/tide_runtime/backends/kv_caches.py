"""KV caches in host memory that grow with their longest sequence and shrink again when cleared.

Batched attention reads every slot of the caches, filled or not, so an unused slot costs as much as a token. Attention of a
single sequence reads only the filled slots, so caches for one sequence have max_seq_len slots from the start.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from tide_runtime.bundle.manifest import Manifest
from tide_runtime.errors import CacheFullError

_MIN_SLOTS = 128  # fewer gain nothing: GroupQueryAttention parallelizes poorly over a short cache
# Growing copies the caches, which takes half a decode step (demo model, 8 sequences). With smaller increments copies cost more
# than the spared slots save; with larger ones the empty slots cost more.
_SLOT_INCREMENT = 32


class KVCaches:
    """Caches of ``capacity`` sequences; ``arrays``: name → [capacity, heads, slots, head_dim].

    ``spare_slots``: slots beyond max_seq_len, which steps pad into. Memory costs nothing until written, because the operating system backs pages lazily. Arrays of any number of slots are views
    from the start of the same allocation; ``generation`` changes when an allocation is replaced, which invalidates bindings.
    """

    def __init__(self, manifest: Manifest, dtype: type[np.generic], capacity: int, spare_slots: int = 0) -> None:
        self.limit, self.generation = manifest.max_seq_len + spare_slots, 0
        self._initial_slots = self.slots = self.limit if capacity == 1 else _slots_for(1, self.limit)
        self._memory: dict[str, NDArray[np.generic]] = {}  # flat allocations, sized for the most slots so far
        self.arrays: dict[str, NDArray[np.generic]] = {}
        for layer, kv in enumerate(manifest.kv):
            for kind, head_dim in (("key", kv.key_dim), ("value", kv.value_dim)):
                shape = (capacity, kv.heads, self.slots, head_dim)
                self._memory[f"{kind}_cache_{layer}"] = np.zeros(prod(shape), dtype)
                self.arrays[f"{kind}_cache_{layer}"] = self._memory[f"{kind}_cache_{layer}"].reshape(shape)

    def clear(self) -> None:
        """Shrink to the initial number of slots; the memory keeps its old contents."""
        if self.slots == self._initial_slots:
            return
        self.slots = self._initial_slots
        for name, array in self.arrays.items():
            self.arrays[name] = self._cut(name, array)

    def reserve(self, needed: int) -> None:
        """Grow to at least ``needed`` slots. Raises CacheFullError beyond the bundle's max_seq_len and the spare slots."""
        if needed <= self.slots:
            return
        if needed > self.limit:
            raise cache_full(needed, self.limit)
        filled, self.slots = self.slots, _slots_for(needed, self.limit)
        replaced = False
        for name, old in self.arrays.items():  # one array at a time, so that only one exists twice
            size = old.size // filled * self.slots
            if self._memory[name].size < size:
                self._memory[name], replaced = np.zeros(size, old.dtype), True
            self.arrays[name] = self._cut(name, old)
            self.arrays[name][:, :, :filled] = old  # NumPy buffers overlapping copies
        self.generation += replaced

    def move_row(self, source: int, target: int, num_cached_tokens: int) -> None:
        """Copy the cached tokens of batch index ``source`` to batch index ``target``, in every layer."""
        for array in self.arrays.values():
            array[target, :, :num_cached_tokens] = array[source, :, :num_cached_tokens]

    def _cut(self, name: str, like: NDArray[np.generic]) -> NDArray[np.generic]:
        """A view of ``name``'s allocation with ``slots`` slots and the other dimensions of ``like``."""
        shape = (*like.shape[:2], self.slots, like.shape[3])
        return self._memory[name][: prod(shape)].reshape(shape)


def cache_full(needed: int, limit: int) -> CacheFullError:
    """The error of a step that needs ``needed`` slots of ``limit``."""
    return CacheFullError(
        f"a step ends at slot {needed}, the KV cache has {limit}; give a step fewer tokens near the end of the "
        f"cache, or export with --max-seq-len {needed} or more"
    )


def _slots_for(needed: int, limit: int) -> int:
    """``needed`` plus an eighth, rounded up: geometric growth keeps the copies per token constant."""
    return min(limit, max(_MIN_SLOTS, -(-(needed + needed // 8) // _SLOT_INCREMENT) * _SLOT_INCREMENT))
