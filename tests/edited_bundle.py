"""Changes of a bundle's manifest, for tests of bundles that differ from what was exported."""

import hashlib
import json
from pathlib import Path
from typing import Any


def manifest_of(bundle: Path) -> Any:
    return json.loads((bundle / "manifest.json").read_text())


def edit(bundle: Path, *path: str | int, value: Any = None, remove: bool = False) -> None:
    """Set or remove one value of the manifest."""
    manifest = place = manifest_of(bundle)
    for key in path[:-1]:
        place = place[key]
    if remove:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def sign(bundle: Path, name: str) -> None:
    """Update the manifest's hash and size of a changed file."""
    content = (bundle / name).read_bytes()
    edit(bundle, "files", name, value={"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)})
