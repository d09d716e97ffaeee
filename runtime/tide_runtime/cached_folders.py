"""Folders that are costly to make, kept in the machine's cache: exported bundles, and weights in ONNX Runtime's packed layout.

The folders of one kind take at most ``TIDE_CACHE_GIB`` together, 20 GiB by default: those that were not used for longest are
deleted first. A file beside each folder, ``NAME.lock``, is locked: shared by every process that uses the folder, until it ends,
so that no other deletes it, and exclusively by the process that makes it. The time of its last change is that of the last use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tide_runtime.errors import ParamsError

LIMIT_VARIABLE = "TIDE_CACHE_GIB"
_DEFAULT_LIMIT = 20.0
_in_use: dict[Path, IO[bytes]] = {}  # locks that this process keeps until it ends


class CachedFolders:
    """The folders of one kind below ``folder``; several processes may use them.

    Raises ParamsError if the environment's limit is no number.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.limit = _limit_bytes()

    def find(self, name: str) -> Path | None:
        """The folder ``name``, which is then in use until this process ends; None if there is none, or it is being made.

        Raises OSError where the cache cannot be read.
        """
        path = self.folder / name
        if not path.is_dir():
            return None
        with _opened(self._lock(path)) as lock:
            if not _locked(lock, fcntl.LOCK_SH) or not path.is_dir():
                return None
            return self._used(path, lock)

    def discard(self, name: str) -> bool:
        """Delete the folder ``name``, which this process has found, unless another one uses it; returns whether it is gone."""
        path = self.folder / name
        lock = _in_use[path]
        if not _locked(lock, fcntl.LOCK_EX):
            fcntl.flock(lock, fcntl.LOCK_SH)  # a failed conversion may lose the lock
            return False
        shutil.rmtree(path, ignore_errors=True)
        _in_use.pop(path).close()
        return True

    def make(self, name: str, build: Callable[[Path, IO[bytes]], None], waits: Callable[[], None] | None = None) -> Path | None:
        """The folder ``name``, in use until this process ends; ``build`` makes it unless another process does.

        Args:
            build: gets the path, which it makes whole or not at all (by renaming), and the locked file: the lock holds as long as
                a process has it open.
            waits: called once before waiting for the other process; None: do not wait, and return None.

        Raises OSError where the cache cannot be written, and what ``build`` raises.
        """
        path = self.folder / name
        if path in _in_use and path.is_dir():
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        with _opened(self._lock(path)) as lock:
            for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_SH):
                if not _locked(lock, kind):
                    if waits is None:
                        return None
                    waits()
                    fcntl.flock(lock, kind)
                if kind == fcntl.LOCK_EX and not path.is_dir():
                    self._delete_partial(path)
                    build(path, lock)
                    self._delete_oldest(path)
                elif kind == fcntl.LOCK_SH and path.is_dir():
                    return self._used(path, lock)
        return self.make(name, build, waits)  # another process has deleted it between the two locks

    def _lock(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.lock")

    def _folders(self) -> list[Path]:
        return [lock.with_suffix("") for lock in self.folder.glob("*.lock") if lock.with_suffix("").is_dir()]

    def _used(self, path: Path, lock: IO[bytes]) -> Path:
        """Keep ``lock`` open, and note the time of the use."""
        _in_use[path] = os.fdopen(os.dup(lock.fileno()), "rb")  # a duplicate has the same lock
        with suppress(OSError):  # a cache on a read-only disk serves as well
            os.utime(self._lock(path))
        return path

    def _delete_oldest(self, kept: Path) -> None:
        """Delete folders that no process uses, the longest unused first, until all take no more than the limit."""
        sizes = {path: folder_bytes(path) for path in self._folders()}
        total = sum(sizes.values())
        for path in sorted(sizes.keys() - {kept}, key=lambda path: self._lock(path).stat().st_mtime):
            if total <= self.limit:
                return
            with _opened(self._lock(path)) as lock:
                if _locked(lock, fcntl.LOCK_EX):
                    shutil.rmtree(path, ignore_errors=True)
                    total -= sizes[path]

    def _delete_partial(self, path: Path) -> None:
        """What a process that was killed has left: temporary folders are named ``.NAME.*``."""
        for left in self.folder.glob(f".{path.name}.*"):
            shutil.rmtree(left, ignore_errors=True)


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below ``folder``."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process may delete the folder
            total += path.stat().st_size if path.is_file() else 0
    return total


def _limit_bytes() -> int:
    text = os.environ.get(LIMIT_VARIABLE) or str(_DEFAULT_LIMIT)
    with suppress(ValueError, OverflowError):
        if (limit := int(float(text) * 2**30)) >= 0:
            return limit
    raise ParamsError(f"{LIMIT_VARIABLE} is {text!r}; set it to a number of GiB, such as {_DEFAULT_LIMIT:.0f}")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file to lock, made where it is missing; one that cannot be written is opened as it is."""
    file: IO[bytes]
    try:
        file = path.open("ab")
    except OSError:
        file = path.open("rb")
    with file:
        yield file


def _locked(file: IO[bytes], kind: int) -> bool:
    """Whether ``file`` could be locked without waiting."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
