"""Manifests and contents of KV caches for the tests of caches and prefix blocks."""

from types import SimpleNamespace
from typing import cast

import numpy as np
from tide_runtime.backends.kv_caches import KVCaches
from tide_runtime.bundle.manifest import KVInfo, Manifest


def manifest(max_seq_len: int, *kv: KVInfo, draft: KVInfo | None = None) -> Manifest:
    """As much of a manifest as caches read."""
    layers = dict(enumerate(kv))
    caches = layers if draft is None else {**layers, len(kv): draft}
    return cast(Manifest, SimpleNamespace(max_seq_len=max_seq_len, kv=layers, caches=caches, layers=kv))


PAGED = manifest(4096, *[KVInfo(3, 64, 64)] * 2)  # SmolLM2's shapes: 16 slots of float32 fill whole pages
UNPAGED = manifest(75, KVInfo(3, 5, 7), KVInfo(1, 9, 3))  # rows begin in the middle of pages; keys and values differ
LOOPED = manifest(75, *[KVInfo(3, 5, 7), KVInfo(1, 9, 3)] * 2)  # of a model with two loops
WITH_PAIRS = manifest(75, *[KVInfo(3, 5, 7)] * 2, draft=KVInfo(1, 9, 3))
MIXED = manifest(700, KVInfo(3, 5, 7), KVInfo(2, 32, 32))  # rows contain whole pages and begin in the middle of one


def fill(caches: KVCaches) -> dict[str, np.ndarray]:
    """Fill all slots with random finite values; returns a copy of them by name."""
    rng = np.random.default_rng(0)
    for array in caches.arrays.values():
        array[...] = rng.integers(-100, 100, array.shape)
    return {name: array.copy() for name, array in caches.arrays.items()}


def resident_bytes() -> int:
    """The physical memory of this process (Linux)."""
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
