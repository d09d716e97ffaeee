"""Compiled images in the machine's cache, keyed by what they are compiled from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tide_runtime.machine_cache import CachedFiles

from tide_plugins.build.resources import Resources


@dataclass(frozen=True)
class CachedImage:
    """A cubin or PTX and the resources of its entry points (none for PTX, which the driver compiles later)."""

    content: bytes
    resources: dict[str, Resources]


def content_key(parts: Iterable[str | bytes]) -> str:
    """SHA-256 of ``parts`` with their lengths, so that different lists never have the same input."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class CubinCache:
    """Images below ``folder``, one file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = CachedFiles(folder)

    def load(self, key: str) -> CachedImage | None:
        """The image of ``key``, or None when it is missing or damaged."""
        if (found := self._files.load(key)) is None:
            return None
        facts, content = found
        return CachedImage(content, {name: Resources(**values) for name, values in facts.items()})

    def store(self, key: str, image: CachedImage) -> None:
        self._files.store(key, {name: asdict(values) for name, values in image.resources.items()}, image.content)
