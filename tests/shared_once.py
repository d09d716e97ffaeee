"""Folders that are made once in a run of the tests, whichever process needs them first: models and their bundles."""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """The base folder of the run, which all its processes share."""
    base = factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base  # as pytest-xdist calls those of its processes


def shared_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder ``name``. The first call of any process has ``make`` write it. Tests must not change it."""
    folder = run_folder(factory) / "shared" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder.with_name(f"{folder.name}.done")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder
