"""KV caches in device memory: all slots of all rows at once, at addresses that never change, as captured graphs need them."""

from __future__ import annotations

from tide_runtime.backends.device.arena import Arena
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.element_types import ElementType
from tide_runtime.backends.kv_caches import cache_full
from tide_runtime.bundle.manifest import Manifest


class DeviceCaches:
    """``shapes``: cache name → [capacity, heads, max_seq_len, width]. Raises TargetError when there is no room."""

    def __init__(self, device: Device, manifest: Manifest, element: ElementType, capacity: int) -> None:
        self._device, self._element, self.limit = device, element, manifest.max_seq_len
        self.shapes: dict[str, tuple[int, int, int, int]] = {}
        for layer, kv in enumerate(manifest.kv):
            for kind, width in (("key", kv.key_dim), ("value", kv.value_dim)):
                self.shapes[f"{kind}_cache_{layer}"] = (capacity, kv.heads, self.limit, width)
        self._arena = Arena(device, {name: capacity * self._row_bytes(name) for name in self.shapes})

    def pointer(self, name: str, first_index: int) -> int:
        return self._arena.pointers[name] + first_index * self._row_bytes(name)

    def reserve(self, needed: int) -> None:
        """Raises CacheFullError for more slots than there are."""
        if needed > self.limit:
            raise cache_full(needed, self.limit)

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` entries of row ``source`` to row ``target``, in every layer."""
        for name, (_, heads, slots, width) in self.shapes.items():
            entry = width * self._element.bytes
            self._device.copy_strided(
                self.pointer(name, target), self.pointer(name, source), slots * entry, length * entry, heads
            )

    def _row_bytes(self, name: str) -> int:
        _, heads, slots, width = self.shapes[name]
        return heads * slots * width * self._element.bytes
