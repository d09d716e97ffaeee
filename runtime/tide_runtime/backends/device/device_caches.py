"""KV caches in device memory: addresses for all rows and slots, and memory for the rows that steps have used so far.

Graphs may be bound to fewer slots than there are addresses for, of which they then read no more. A view of the first slots would
not be contiguous, as ONNX Runtime's bindings are, so the caches lie packed for the slots in use: [capacity, heads, slots,
head_dim] from the same address on. When more are needed, the slots double and what is cached moves. What the rows in use take is
therefore the beginning of each cache, which alone has memory.
"""

from __future__ import annotations

from tide_runtime.backends.device.arena import layout
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.element_types import ElementType
from tide_runtime.backends.kv_caches import cache_full
from tide_runtime.bundle.manifest import Manifest

GROWING_SLOTS = 512  # slots at first, where graphs take any number of them and read all that are bound


def slots_for(needed: int, limit: int, min_slots: int | None) -> int:
    """Slots in use for ``needed`` tokens: ``limit`` / 2^k, at least ``min_slots``; None: ``limit``."""
    slots = limit
    while min_slots is not None and slots >> 1 >= max(needed, min_slots):
        slots >>= 1
    return slots


class DeviceCaches:
    """``shapes``: cache name → [capacity, heads, slots, head_dim]. ``rows``: those from the first on that are in use.

    Args:
        min_slots: begin with ``limit`` / 2^k slots, at least so many; None: all of them, at all times.
        of_draft_head: with the draft head's, which counts as one more layer.

    Raises DeviceMemoryError when memory is short.
    """

    def __init__(
        self,
        device: Device,
        manifest: Manifest,
        element: ElementType,
        capacity: int,
        min_slots: int | None = None,
        of_draft_head: bool = False,
    ) -> None:
        self._device = device
        self._element = element
        self.limit = manifest.max_seq_len
        self._capacity = capacity
        self._min_slots = min_slots
        self.rows = 0
        self._heads: dict[str, tuple[int, int]] = {}
        for layer, kv in (manifest.caches if of_draft_head else manifest.kv).items():
            for kind, head_dim in (("key", kv.key_dim), ("value", kv.value_dim)):
                self._heads[f"{kind}_cache_{layer}"] = (kv.heads, head_dim)
        self._offsets, total = layout({name: capacity * self._row_bytes(name, self.limit) for name in self._heads})
        self._memory = device.reserve(total)
        self.shrink()

    def pointer(self, name: str, batch_index: int) -> int:
        return self._memory.pointer + self._offsets[name] + batch_index * self._row_bytes(name, self.slots)

    def reserve(self, needed: int, rows: int = 0) -> None:
        """Provide ``needed`` slots, and memory for the first ``rows`` rows; those in use keep theirs.

        Raises:
            CacheFullError: ``needed`` exceeds max_seq_len.
            DeviceMemoryError: memory is short; the caches are as before.
        """
        if needed > self.limit:
            raise cache_full(needed, self.limit)
        slots = max(self.slots, slots_for(needed, self.limit, self._min_slots))
        assert rows <= self._capacity
        rows = max(rows, self.rows)
        if slots == self.slots and rows == self.rows:
            return
        self._memory.provide((first, first + rows * self._row_bytes(name, slots)) for name, first in self._offsets.items())
        if slots > self.slots:
            self._move(slots)
        self.rows = rows

    def shrink(self) -> None:
        """Use no rows, and as few slots as in the beginning. Nothing may be cached. Rows keep the memory that they have."""
        self.rows = 0
        self._set_slots(slots_for(0, self.limit, self._min_slots))

    def move_row(self, source: int, target: int, num_cached_tokens: int) -> None:
        """Copy the cached tokens of batch index ``source`` to batch index ``target``, in every layer."""
        self.reserve(num_cached_tokens, target + 1)
        for name, (_, heads, slots, head_dim) in self.shapes.items():
            entry_bytes = head_dim * self._element.bytes
            pitch, width = slots * entry_bytes, num_cached_tokens * entry_bytes
            self._device.copy_strided(self.pointer(name, target), self.pointer(name, source), pitch, width, heads)

    def clear_row(self, row: int) -> None:
        """Write zeros over everything that ``row`` holds."""
        if row < self.rows:
            for name in self.shapes:
                self._device.zero(self.pointer(name, row), self._row_bytes(name, self.slots))

    def _move(self, slots: int) -> None:
        """Move what is cached to where it lies with ``slots``, at least twice as many: the last sequences and heads first.

        Blocks, one for each sequence and head, from number n to before 2n move in one copy: they land behind their sources, and
        behind all blocks that have not moved yet.
        """
        old_slots = self.slots
        self._set_slots(slots)
        for name, (heads, head_dim) in self._heads.items():
            base = self.pointer(name, 0)
            blocks = self.rows * heads
            old, new = (count * head_dim * self._element.bytes for count in (old_slots, slots))
            for first in (1 << power for power in reversed(range(blocks.bit_length())) if 1 << power < blocks):
                count = min(first, blocks - first)
                self._device.copy_strided(base + first * new, base + first * old, new, old, count, source_pitch=old)

    def _set_slots(self, slots: int) -> None:
        self.slots = slots
        self.shapes = {name: (self._capacity, heads, slots, dim) for name, (heads, dim) in self._heads.items()}

    def _row_bytes(self, name: str, slots: int) -> int:
        heads, head_dim = self._heads[name]
        return heads * slots * head_dim * self._element.bytes
