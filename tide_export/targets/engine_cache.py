"""Engines on disk, keyed by all inputs of their build, so that an export builds only what has changed.

Folder: ``$TIDE_CACHE_DIR/engines``, else ``$XDG_CACHE_HOME/tide/engines``, else ``~/.cache/tide/engines``. It may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class BuiltEngine:
    """``plan``: the serialized engine; ``attention``: ``fused``, ``decomposed`` or ``none``."""

    plan: bytes
    build_seconds: float
    attention: str


def default_cache_folder() -> Path:
    if folder := os.environ.get("TIDE_CACHE_DIR"):
        return Path(folder) / "engines"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tide" / "engines"


def engine_key(parts: Iterable[str]) -> str:
    """SHA-256 of ``parts``, in order."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


class EngineCache:
    """Engines under ``folder``, one file each: a line of JSON, then the plan. Processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str) -> BuiltEngine | None:
        """The engine of ``key``; None if there is none, or if it is damaged on disk."""
        try:
            line, plan = (self.folder / key).read_bytes().split(b"\n", 1)
            facts = json.loads(line)
        except (FileNotFoundError, ValueError):
            return None
        if facts.pop("sha256") != hashlib.sha256(plan).hexdigest():
            return None
        return BuiltEngine(plan, **facts)

    def store(self, key: str, engine: BuiltEngine) -> None:
        """Write ``engine`` to a temporary file and rename it, so that a reader sees a whole engine or none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        facts = asdict(engine) | {"sha256": hashlib.sha256(engine.plan).hexdigest()}
        facts.pop("plan")
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix="new-", delete=False) as file:
            file.write(json.dumps(facts).encode() + b"\n" + engine.plan)
        Path(file.name).rename(self.folder / key)
