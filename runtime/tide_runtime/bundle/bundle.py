"""Opening of a bundle directory: reads the manifest and checks that the files exist and are unchanged."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path

from tide_runtime.bundle.manifest import FileInfo, Manifest, read_manifest
from tide_runtime.errors import BundleError


@dataclass(frozen=True)
class Bundle:
    """A checked bundle on disk."""

    directory: Path
    manifest: Manifest

    @staticmethod
    def open(directory: str | Path, verify: bool = True) -> Bundle:
        """Read and check the bundle in ``directory``.

        ``verify``: compare the SHA-256 of every file with the manifest (about a second per GB); sizes are always compared.
        Raises BundleError, which names the file, when one is missing, truncated or changed.
        """
        root = Path(directory)
        manifest = read_manifest(root)
        for name, info in manifest.files.items():
            try:
                _check_file(root, name, info, verify)
            except (OSError, ValueError, RuntimeError) as error:  # unreadable file, invalid name, link loop
                raise BundleError(f"{name} cannot be read ({error}); make the bundle's files readable or export again") from error
        return Bundle(root, manifest)

    def path(self, name: str) -> Path:
        return self.directory / name

    def text(self, name: str) -> str:
        try:
            return self.path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BundleError(f"{name} is not UTF-8 text ({error}); export the bundle again") from error


def _check_file(root: Path, name: str, info: FileInfo, verify: bool) -> None:
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise BundleError(f"{name} is a link that leaves the bundle; copy the file into {root} or export again")
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        status = None
    if status is None or not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{name} is missing from the bundle {root}; copy the whole folder or export again")
    size = status.st_size
    if size != info.bytes:
        raise BundleError(
            f"{name} has {size} bytes, expected {info.bytes}: it is truncated or changed; copy it again or export again"
        )
    if verify and sha256_of(path) != info.sha256:
        raise BundleError(
            f"{name} does not match the SHA-256 in the manifest: it is corrupt or changed; copy it again or export again"
        )


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
