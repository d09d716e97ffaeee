"""Folders that are slow to make: made again only when what they depend on has changed, in a process that ends with its memory."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

_KEY_FILE = "bench-key.txt"


def cached_folder(folder: Path, key: str, make: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``make(folder)`` unless it was already filled for the same ``key``."""
    cached_folders({folder: key}, lambda stale: make(stale[0]))
    return folder


def cached_folders(keys: Mapping[Path, str], make: Callable[[list[Path]], None]) -> None:
    """Have ``make`` fill those folders at once that were not already filled for their key."""
    stale = [folder for folder, key in keys.items() if _key_of(folder) != key]
    for folder in stale:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    if stale:
        make(stale)
    for folder in stale:  # last: an interrupted `make` leaves folders without a key
        (folder / _KEY_FILE).write_text(keys[folder], encoding="utf-8")


def _key_of(folder: Path) -> str | None:
    stamp = folder / _KEY_FILE
    return stamp.read_text(encoding="utf-8") if stamp.is_file() else None


def files_digest(files: Iterable[Path]) -> str:
    """SHA-256 over the names and bytes of ``files``, in the order given."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def run_in_process(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` from a fresh interpreter; its exception is raised here. All of it must pickle."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
