"""Engines in the machine's cache, keyed by all inputs of their build, so that an export builds only what has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tide_runtime.machine_cache import CachedFiles


@dataclass(frozen=True)
class BuiltEngine:
    """``plan``: the serialized engine; ``attention``: ``fused``, ``decomposed`` or ``none``."""

    plan: bytes
    build_seconds: float
    attention: str


def engine_key(parts: Iterable[str]) -> str:
    """SHA-256 of ``parts``, in order."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


class EngineCache:
    """Engines below ``folder``, one file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = CachedFiles(folder)

    def load(self, key: str) -> BuiltEngine | None:
        """The engine of ``key``; None if there is none, or if it is damaged on disk."""
        found = self._files.load(key)
        return BuiltEngine(found[1], **found[0]) if found is not None else None

    def store(self, key: str, engine: BuiltEngine) -> None:
        self._files.store(key, {"build_seconds": engine.build_seconds, "attention": engine.attention}, engine.plan)
