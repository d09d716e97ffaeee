"""KV caches in device memory: all slots are allocated at once, at fixed addresses, as captured graphs require."""

from __future__ import annotations

import numpy as np

from tide_runtime.backends.device.arena import Arena
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.element_types import ElementType
from tide_runtime.backends.kv_caches import cache_full
from tide_runtime.bundle.manifest import Manifest


class DeviceCaches:
    """``shapes``: cache name → [capacity, heads, max_seq_len, head_dim]. Raises TargetError when memory is short."""

    def __init__(self, device: Device, manifest: Manifest, element: ElementType, capacity: int) -> None:
        self._device, self._element, self.limit = device, element, manifest.max_seq_len
        self.shapes: dict[str, tuple[int, int, int, int]] = {}
        for layer, kv in enumerate(manifest.kv):
            for kind, head_dim in (("key", kv.key_dim), ("value", kv.value_dim)):
                self.shapes[f"{kind}_cache_{layer}"] = (capacity, kv.heads, self.limit, head_dim)
        self._arena = Arena(device, {name: capacity * self._sequence_bytes(name) for name in self.shapes})

    def pointer(self, name: str, batch_index: int) -> int:
        return self._arena.pointers[name] + batch_index * self._sequence_bytes(name)

    def reserve(self, needed: int) -> None:
        """Raise CacheFullError when ``needed`` exceeds max_seq_len slots."""
        if needed > self.limit:
            raise cache_full(needed, self.limit)

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

    def _sequence_bytes(self, name: str) -> int:
        _, heads, slots, head_dim = self.shapes[name]
        return heads * slots * head_dim * self._element.bytes
