"""Texts of a data set on the Hugging Face hub, through the optional ``datasets`` package."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tide_runtime.errors import DataError

# 2,000 windows of 256 tokens are about 2 MB of English: many times that leaves a choice, and a web crawl ends somewhere.
MAX_CHARACTERS = 32_000_000


@dataclass(frozen=True)
class HubData:
    """``name[:config][:split][:column]``; an empty part means its default."""

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"


def parse(source: str) -> HubData:
    """Raises DataError when ``source`` cannot be a data set id."""
    name, *rest = source.split(":")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or len(rest) > 3:
        raise DataError(
            f"there is no file or directory {source}, and it is no data set id (name[:config][:split][:column]); "
            "give a text file, a .jsonl file, a directory, or a data set id such as wikitext:wikitext-2-raw-v1:test"
        )
    config, split, column = (*rest, "", "", "")[:3]
    return HubData(name, config or None, split or HubData.split, column or HubData.column)


def hub_texts(source: str, note: Callable[[str], None]) -> list[tuple[str, str]]:
    """(``name[row]``, text) of the first rows of the data set, up to 32 million characters. Raises DataError."""
    data = parse(source)
    texts: list[tuple[str, str]] = []
    characters = 0
    for row, record in enumerate(_rows(data)):
        if characters >= MAX_CHARACTERS:
            note(f"{data.name}: read the first {row} rows, {characters} characters")
            break
        texts.append((f"{data.name}[{row}]", _text(data, row, record)))
        characters += len(texts[-1][1])
    return texts


def _rows(data: HubData) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"there is no file or directory {data.name}; if it is a data set on the Hugging Face hub, "
            "install what reads it: pip install 'tide-llm[datasets]'"
        ) from error
    try:
        yield from datasets.load_dataset(data.name, data.config, split=data.split, streaming=True)
    except Exception as error:  # the package lets through whatever its many file systems and formats raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"cannot read the data set {data.name} (config {data.config or 'default'}, split {data.split}): {reason}; "
            "check its name and the network, or download it and give the files"
        ) from error


def _text(data: HubData, row: int, record: dict[str, Any]) -> str:
    text = record.get(data.column)
    if not isinstance(text, str):
        raise DataError(
            f"{data.name}[{row}] has no text in the column {data.column!r}; its columns are {', '.join(record)}; "
            f"name one: {data.name}:{data.config or ''}:{data.split}:COLUMN"
        )
    return text
