"""Folders that are slow to make: made again only when what they depend on has changed, in a process that ends with its memory."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

_KEY_FILE = "bench-key.txt"


def cached_folder(folder: Path, key: str, make: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``make(folder)`` unless it was already filled for the same ``key``."""
    stamp = folder / _KEY_FILE
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != key:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder)
        stamp.write_text(key, encoding="utf-8")  # last: an interrupted `make` leaves a folder without a key
    return folder


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
