"""Pieces of the prefix cache in a folder, a file each, named by a key that says what a piece holds.

Any number of processes share a folder: a file comes into being whole, by renaming, and any process may delete it at any time. Its
time of change is that of its last use; the files that were not used for longest go first. A file whose digest does not fit its
name and content is deleted: then it is written again.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.errors import ParamsError

Parts = Sequence[NDArray[np.uint8]]  # a piece in memory: contiguous bytes, in order
_DIGEST = hashlib.sha256  # the processor has instructions for it: 1 to 2 GB/s, as fast as the copy from the system's page cache
_DIGEST_BYTES = 32
_PAGE = 4096  # bytes; files take whole pages of the disk
_NEW = ".tide-"  # begins the names of files that are being written
_OWN = re.compile(rf"[0-9a-f]{{64}}|{re.escape(_NEW)}\w+")  # other files of the folder are left alone
_LIMIT_PARTS = 32  # after 1/32 of the limit is written, the folder is scanned for files of other processes


class FileCounts(NamedTuple):
    """Totals of this process. ``damaged``: files that were deleted because they did not hold what their name says."""

    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    damaged: int = 0


class PrefixCacheFolder:
    """The files of ``folder``, which is made, for the owner alone, where it is missing. One thread may write while another reads.

    Args:
        limit: bytes that all files of the folder take together. While several processes write, each may exceed it by a 32nd.

    Raises ParamsError where the folder cannot be made or written.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.counts = FileCounts()
        self._used_bytes, self._written_bytes = 0, limit  # bytes at the latest look, and written since; the first write looks
        self._lock = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError("it cannot be written")
        except OSError as error:
            raise ParamsError(f"prefix_dir is {folder} ({error}); give a folder that this user can write") from error

    def has(self, key: bytes) -> bool:
        """Whether there is a file for ``key``, damaged or not."""
        return os.path.exists(self._path(key))

    def read(self, key: bytes, size: int) -> NDArray[np.uint8] | None:
        """The piece of ``key``, [size] bytes; None where there is no such piece of that size."""
        path = self._path(key)
        digest = bytearray(_DIGEST_BYTES)
        content = np.empty(size, np.uint8)
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            whole = os.fstat(file).st_size == size + _DIGEST_BYTES == os.readv(file, [digest, content.data])
            whole = whole and digest == _digest(key, [content])
            if whole:
                os.utime(file)
        except OSError:
            whole = False
        finally:
            os.close(file)
        if whole:
            self._count(reads=1, read_bytes=size)
            return content
        self._count(damaged=1)
        with suppress(OSError):
            os.unlink(path)
        return None

    def write(self, key: bytes, content: Parts, unchanged: Callable[[], bool]) -> None:
        """Write a piece, unless there is one; nothing is written where ``content`` is not ``unchanged`` afterwards.

        Raises OSError where the folder cannot be written.
        """
        path = self._path(key)
        size = _DIGEST_BYTES + sum(part.nbytes for part in content)
        if size > self.limit or os.path.exists(path) or not unchanged():
            return
        self._make_room(size)
        file, new = tempfile.mkstemp(prefix=_NEW, dir=self.folder)
        try:
            try:
                written = os.writev(file, [_digest(key, content), *(part.data for part in content)])
            finally:
                os.close(file)
            if written == size and unchanged():
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                os.rename(new, path)
                self._written_bytes += _on_disk(size)
                self._count(writes=1, written_bytes=size - _DIGEST_BYTES)
                return
        except BaseException:
            with suppress(OSError):
                os.unlink(new)
            raise
        with suppress(OSError):
            os.unlink(new)

    def use(self, keys: Sequence[bytes]) -> None:
        """Note that the pieces of a text are used, the first one last: it is of use without those after it."""
        now = time.time_ns()
        for later, key in enumerate(reversed(keys)):
            with suppress(OSError):  # another process may have deleted it
                os.utime(self._path(key), ns=(now + later, now + later))

    def _make_room(self, size: int) -> None:
        """Delete the files that were not used for longest, so that ``size`` more bytes fit."""
        needed = _on_disk(size)
        if self._written_bytes < self.limit // _LIMIT_PARTS and self._used_bytes + self._written_bytes + needed <= self.limit:
            return
        files = sorted(self._files())
        self._used_bytes = sum(size for _, size, _ in files)
        self._written_bytes = 0
        if self._used_bytes + needed <= self.limit:
            return
        for _, size, path in files:
            if self._used_bytes + needed <= self.limit - self.limit // _LIMIT_PARTS:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._used_bytes -= size

    def _files(self) -> list[tuple[int, int, str]]:
        """Time of the last use, bytes on disk and path of every piece, those that others are writing included."""
        found = list[tuple[int, int, str]]()
        for folder in (str(self.folder), *(f"{self.folder}/{number:02x}" for number in range(256))):
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if _OWN.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                            status = entry.stat(follow_symlinks=False)
                            found.append((status.st_mtime_ns, _on_disk(status.st_size), entry.path))
        return found

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.folder}/{name[:2]}/{name}"

    def _count(self, **more: int) -> None:
        with self._lock:
            self.counts = self.counts._replace(**{name: getattr(self.counts, name) + n for name, n in more.items()})


def _digest(key: bytes, content: Parts) -> bytes:
    digest = _DIGEST(key)
    for part in content:
        digest.update(part.data)
    return digest.digest()


def _on_disk(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
