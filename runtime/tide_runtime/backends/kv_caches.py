"""KV caches that are as long as their longest row needs: they grow with it, and are short again for the next rows.

The attention of several rows reads every slot of the cache, whatever the rows' lengths, so a slot too many costs as much as
a token. That of one row reads its valid length only: caches of one row have all their slots at once.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from tide_runtime.bundle.manifest import Manifest
from tide_runtime.errors import CacheFullError

_LEAST_SLOTS = 128  # fewer gain nothing: GroupQueryAttention divides its work badly over a short cache
# Growing copies the caches: measured on the demo model with 8 rows, half a decode step. Finer steps copy more often than
# the slots they spare are worth, coarser ones the other way round.
_SLOT_STEP = 32


class KVCaches:
    """The caches of ``capacity`` rows, ``arrays`` name → [capacity, heads, slots, width].

    Untouched pages cost nothing: the operating system backs them when first written. Arrays of every length start where
    their memory starts; ``generation`` changes whenever longer ones need more of it, which makes bindings to the old stale.
    """

    def __init__(self, manifest: Manifest, dtype: type[np.generic], capacity: int) -> None:
        self.limit, self.generation = manifest.max_seq_len, 0
        self._fewest = self.slots = self.limit if capacity == 1 else _slots_for(1, self.limit)
        self._memory: dict[str, NDArray[np.generic]] = {}  # [capacity · heads · slots · width], of the most slots so far
        self.arrays: dict[str, NDArray[np.generic]] = {}
        for layer, kv in enumerate(manifest.kv):
            for kind, width in (("key", kv.key_dim), ("value", kv.value_dim)):
                shape = (capacity, kv.heads, self.slots, width)
                self._memory[f"{kind}_cache_{layer}"] = np.zeros(prod(shape), dtype)
                self.arrays[f"{kind}_cache_{layer}"] = self._memory[f"{kind}_cache_{layer}"].reshape(shape)

    def clear(self) -> None:
        """Forget all rows: as few slots as new caches have, with what was in that memory."""
        if self.slots == self._fewest:
            return
        self.slots = self._fewest
        for name, array in self.arrays.items():
            self.arrays[name] = self._cut(name, array)

    def reserve(self, needed: int) -> None:
        """Have at least ``needed`` slots. Raises CacheFullError when that is more than the bundle's max_seq_len."""
        if needed <= self.slots:
            return
        if needed > self.limit:
            raise cache_full(needed, self.limit)
        filled, self.slots = self.slots, _slots_for(needed, self.limit)
        replaced = False
        for name, old in self.arrays.items():  # one at a time: never two copies of everything
            size = old.size // filled * self.slots
            if self._memory[name].size < size:
                self._memory[name], replaced = np.zeros(size, old.dtype), True
            self.arrays[name] = self._cut(name, old)
            self.arrays[name][:, :, :filled] = old  # NumPy copies as if they did not overlap
        self.generation += replaced

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` entries of row ``source`` to row ``target``, in every layer."""
        for array in self.arrays.values():
            array[target, :, :length] = array[source, :, :length]

    def _cut(self, name: str, like: NDArray[np.generic]) -> NDArray[np.generic]:
        """``slots`` slots, in the memory of that name, for the rows of ``like``."""
        shape = (*like.shape[:2], self.slots, like.shape[3])
        return self._memory[name][: prod(shape)].reshape(shape)


def cache_full(needed: int, limit: int) -> CacheFullError:
    """For a step that ends at slot ``needed`` of ``limit``."""
    return CacheFullError(
        f"a step ends at slot {needed}, the KV cache has {limit}; give a step fewer tokens near the end of the "
        f"cache, or export with --max-seq-len {needed} or more"
    )


def _slots_for(needed: int, limit: int) -> int:
    """``needed`` and an eighth more, so that long caches are copied no more often per token than short ones."""
    return min(limit, max(_LEAST_SLOTS, -(-(needed + needed // 8) // _SLOT_STEP) * _SLOT_STEP))
