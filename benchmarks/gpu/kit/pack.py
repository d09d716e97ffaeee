"""What has to travel to a GPU machine, as one archive of the last commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.gpu.kit.bare_image import ROOT

# The other demo models, and pictures: the kit reads none of them.
_LEFT_OUT = ("examples/demo_model/stock", "examples/demo_model/looped", "docs/pictures")


def archive() -> bytes:
    """A tar file. Raises CalledProcessError outside of a repository."""
    paths = [".", *(f":(exclude){path}" for path in _LEFT_OUT)]
    return subprocess.run(["git", "archive", "HEAD", "--", *paths], cwd=ROOT, capture_output=True, check=True).stdout


def pack(path: Path) -> None:
    """Write the archive to ``path``, and say how large it is."""
    content = archive()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    print(f"{path}: {len(content) / 2**20:.1f} MiB")
