"""Content-addressed cache of compiled images on disk, safe for concurrent processes.

An entry is a folder named by its key. It is written under a temporary name and renamed atomically, so that readers see a complete
entry or none. Processes that create the same entry write the same bytes, so the second one discards its copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tide_plugins.build.resources import Resources

_IMAGE, _FACTS = "image", "facts.json"


@dataclass(frozen=True)
class CachedImage:
    """A cubin or PTX and the resources of its entry points (none for PTX, which the driver compiles later)."""

    content: bytes
    resources: dict[str, Resources]


def default_cache_folder() -> Path:
    """``$TIDE_CACHE_DIR/cubins``, else ``~/.cache/tide/cubins`` unless XDG_CACHE_HOME is set."""
    if folder := os.environ.get("TIDE_CACHE_DIR"):
        return Path(folder) / "cubins"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tide" / "cubins"


def content_key(parts: Iterable[str | bytes]) -> str:
    """SHA-256 of ``parts`` with their lengths, so that different lists never have the same input."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class CubinCache:
    """Images in ``folder``, which is created when the first one is stored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str) -> CachedImage | None:
        """The image of ``key``, or None when it is missing or damaged."""
        try:
            content = (self.folder / key / _IMAGE).read_bytes()
            facts = json.loads((self.folder / key / _FACTS).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        if facts["sha256"] != hashlib.sha256(content).hexdigest():
            return None
        return CachedImage(content, {name: Resources(**values) for name, values in facts["resources"].items()})

    def store(self, key: str, image: CachedImage) -> None:
        """Store ``image`` under ``key``; replaces a damaged entry."""
        self.folder.mkdir(parents=True, exist_ok=True)
        filled = Path(tempfile.mkdtemp(prefix="new-", dir=self.folder))
        try:
            (filled / _IMAGE).write_bytes(image.content)
            (filled / _FACTS).write_text(json.dumps(_facts(image), indent=1), encoding="utf-8")
            self._publish(filled, key)
        finally:
            shutil.rmtree(filled, ignore_errors=True)

    def _publish(self, filled: Path, key: str) -> None:
        if self.load(key) is None:  # missing or damaged; a rename does not replace a non-empty folder
            shutil.rmtree(self.folder / key, ignore_errors=True)
        try:
            filled.rename(self.folder / key)
        except OSError:
            if self.load(key) is None:
                raise


def _facts(image: CachedImage) -> dict[str, object]:
    resources = {name: asdict(values) for name, values in image.resources.items()}
    return {"sha256": hashlib.sha256(image.content).hexdigest(), "resources": resources}
