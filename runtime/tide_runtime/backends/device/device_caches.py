"""KV caches in device memory, allocated for all slots at once. Graphs may be bound to fewer, of which they then read no more.

A view of the first slots would not be contiguous, as ONNX Runtime's bindings are, so the caches lie packed for the slots in use:
[capacity, heads, slots, head_dim] from the same address on. When more are needed, the slots double and what is cached moves.
"""

from __future__ import annotations

import numpy as np

from tide_runtime.backends.device.arena import Arena
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.element_types import ElementType
from tide_runtime.backends.kv_caches import cache_full
from tide_runtime.bundle.manifest import Manifest


class DeviceCaches:
    """``shapes``: cache name → [capacity, heads, slots, head_dim]. Raises TargetError when memory is short.

    Args:
        least: begin with ``limit`` / 2^k slots, at least so many; None: all of them, at all times.
        of_draft_head: with the draft head's, which counts as one more layer.
    """

    def __init__(
        self,
        device: Device,
        manifest: Manifest,
        element: ElementType,
        capacity: int,
        least: int | None = None,
        of_draft_head: bool = False,
    ) -> None:
        self._device, self._element, self.limit, self._capacity = device, element, manifest.max_seq_len, capacity
        self._halvings = 0
        while least is not None and self.limit >> (self._halvings + 1) >= least:
            self._halvings += 1
        self._heads: dict[str, tuple[int, int]] = {}
        for layer, kv in (manifest.caches if of_draft_head else manifest.kv).items():
            for kind, head_dim in (("key", kv.key_dim), ("value", kv.value_dim)):
                self._heads[f"{kind}_cache_{layer}"] = (kv.heads, head_dim)
        self._set_slots(self.limit)
        self._arena = Arena(device, {name: capacity * self._sequence_bytes(name) for name in self.shapes})
        self.shrink()

    def pointer(self, name: str, batch_index: int) -> int:
        return self._arena.pointers[name] + batch_index * self._sequence_bytes(name)

    def reserve(self, needed: int) -> None:
        """Provide ``needed`` slots. Raises CacheFullError when these exceed max_seq_len."""
        if needed > self.limit:
            raise cache_full(needed, self.limit)
        if needed > self.slots:
            self._grow(next(slots for k in range(self._halvings, -1, -1) if (slots := self.limit >> k) >= needed))

    def shrink(self) -> None:
        """Use as few slots as in the beginning. Nothing may be cached."""
        self._set_slots(self.limit >> self._halvings)

    def move_row(self, source: int, target: int, num_cached_tokens: int) -> None:
        """Copy the cached tokens of batch index ``source`` to batch index ``target``, in every layer."""
        for name, (_, heads, slots, head_dim) in self.shapes.items():
            entry_bytes = head_dim * self._element.bytes
            pitch, width = slots * entry_bytes, num_cached_tokens * entry_bytes
            self._device.copy_strided(self.pointer(name, target), self.pointer(name, source), pitch, width, heads)

    def clear_row(self, row: int) -> None:
        """Write zeros over everything that ``row`` holds."""
        for name in self.shapes:
            self._device.upload(self.pointer(name, row), np.zeros(self._sequence_bytes(name), np.uint8))

    def _grow(self, slots: int) -> None:
        """Move what is cached to where it lies with ``slots``, at least twice as many: the last sequences and heads first.

        Blocks, one for each sequence and head, from number n to before 2n move in one copy: they land behind their sources, and
        behind all blocks that have not moved yet.
        """
        old_slots = self.slots
        self._set_slots(slots)
        for name, (heads, head_dim) in self._heads.items():
            base, blocks = self._arena.pointers[name], self._capacity * heads
            old, new = (count * head_dim * self._element.bytes for count in (old_slots, slots))
            for first in (1 << power for power in reversed(range(blocks.bit_length())) if 1 << power < blocks):
                count = min(first, blocks - first)
                self._device.copy_strided(base + first * new, base + first * old, new, old, count, source_pitch=old)

    def _set_slots(self, slots: int) -> None:
        self.slots = slots
        self.shapes = {name: (self._capacity, heads, slots, dim) for name, (heads, dim) in self._heads.items()}

    def _sequence_bytes(self, name: str) -> int:
        _, heads, slots, head_dim = self.shapes[name]
        return heads * slots * head_dim * self._element.bytes
