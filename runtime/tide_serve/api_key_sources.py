"""Where API keys come from: a file, the environment, or, with a warning, the command line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tide_runtime.errors import ParamsError

VARIABLE = "TIDE_API_KEYS"
_SHORT = 16  # characters; shorter keys can be guessed


def api_keys(file: Path | None, given: Sequence[str]) -> tuple[str, ...]:
    """All keys of ``file``, one a line (``#`` begins a comment), of the environment variable, separated by commas, and ``given``.

    Raises ParamsError for a source without keys, which would leave the server open, and for keys that no header can carry.
    """
    keys = list(given)
    if file is not None:
        keys += _source(f"the file {file}", (line.partition("#")[0] for line in _lines(file)))
    if (variable := os.environ.get(VARIABLE)) is not None:
        keys += _source(f"the environment variable {VARIABLE}", variable.split(","))
    for key in keys:
        if not key or not all("!" <= character <= "~" for character in key):
            raise ParamsError("an API key is empty or has characters outside printable ASCII; use letters and digits")
    return tuple(dict.fromkeys(keys))


def short_keys(keys: Sequence[str]) -> int:
    """How many of ``keys`` are too short to be safe."""
    return sum(len(key) < _SHORT for key in keys)


def _source(name: str, entries: Iterable[str]) -> list[str]:
    keys = [entry.strip() for entry in entries if entry.strip()]
    if not keys:
        raise ParamsError(f"{name} has no API key; add one, or leave the option out to serve without keys")
    return keys


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParamsError(
            f"the API keys' file {file} cannot be read ({error}); give a text file with a key on each line"
        ) from error
