"""Read text: documents of files, directories and data sets of the Hugging Face hub.

Text that cannot be read is an error with a remedy; it is never replaced by other text.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_runtime.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".py", ".json", ".jsonl", ".csv")
# 2,000 windows of 256 tokens are about 2 MB of English text; a multiple of that leaves a choice, and bounds endless web crawls.
MAX_CHARACTERS = 32_000_000

Note = Callable[[str], None]
_log: Note = logging.getLogger("tide_export").warning


@dataclass(frozen=True)
class Document:
    """One text; ``name`` is its source (a path, ``file.jsonl:line``, or ``dataset[row]``)."""

    name: str
    text: str


def load_documents(source: str, note: Note = _log) -> list[Document]:
    """Read documents from a text file, a ``.jsonl`` file, a directory, or a HF data set ``name[:config][:split][:column]``.

    A ``.jsonl`` file has one object with the field "text" per line. All text files below a directory are read in order of their
    relative path. Skipped files and documents are reported through ``note``. Raises DataError.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        documents = _read_directory(path, note)
    elif path.exists():
        documents = _read_file(path)
    elif _looks_like_path(source):
        raise DataError(f"there is no file or directory {source}; give a text file, a .jsonl file, a directory, or a data set id")
    else:
        documents = hub_documents(source, note)
    kept = [d for d in documents if d.text.strip()]
    if not kept:
        raise DataError(f"{source} holds no text ({len(documents)} empty documents); give files with text to calibrate on")
    if len(kept) < len(documents):
        note(f"{source}: left out {len(documents) - len(kept)} empty documents")
    return kept


# --- files


def _read_file(path: Path) -> list[Document]:
    text = _read_text(path)
    if text is None:
        raise DataError(f"{path} is not UTF-8 text; give text, code or .jsonl, or convert it (iconv -t utf-8)")
    return _parse_documents(path.name, text)


def _read_directory(directory: Path, note: Note) -> list[Document]:
    documents: list[Document] = []
    for path in _files_below(directory):
        name = path.relative_to(directory).as_posix()
        text = _read_text(path)
        if text is None:
            note(f"{name}: left out, it is not UTF-8 text")
        else:
            documents.extend(_parse_documents(name, text))
    if not documents:
        raise DataError(f"{directory} holds no text files; give a directory with UTF-8 text, code or .jsonl files")
    return documents


def _files_below(directory: Path) -> list[Path]:
    """Regular files below ``directory``, without hidden ones (such as .git); links to directories are not followed."""
    found: list[Path] = []
    for folder, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted((p for p in found if p.is_file()), key=lambda p: p.relative_to(directory).as_posix())


def _read_text(path: Path) -> str | None:
    """Read a file; None when it is not UTF-8 text."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    return None if "\0" in text else text


def _parse_documents(name: str, text: str) -> list[Document]:
    if not name.endswith(".jsonl"):
        return [Document(name, text)]
    lines = enumerate(text.split("\n"), start=1)
    return [Document(f"{name}:{number}", _parse_jsonl_line(f"{name}:{number}", line)) for number, line in lines if line.strip()]


def _parse_jsonl_line(where: str, line: str) -> str:
    expected = 'expected one JSON object a line, such as {"text": "…"}'
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}); {expected}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        found = f"fields {', '.join(map(repr, record)) or 'none'}" if isinstance(record, dict) else type(record).__name__
        raise DataError(f'{where}: no string in the field "text" (found {found}); {expected}')
    return record["text"]


def _looks_like_path(source: str) -> bool:
    dataset = source.split(":")[0]
    return source.startswith((".", "/", "~")) or dataset.count("/") > 1 or bool(Path(dataset).suffix in TEXT_SUFFIXES)


# --- data sets of the Hugging Face hub


@dataclass(frozen=True)
class DatasetId:
    """Parts of ``name[:config][:split][:column]``; an empty part stands for its default."""

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"


def parse_dataset_id(source: str) -> DatasetId:
    """Parse a data set id. Raises DataError when ``source`` is none."""
    name, *rest = source.split(":")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or len(rest) > 3:
        raise DataError(
            f"there is no file or directory {source}, and it is no data set id (name[:config][:split][:column]); "
            "give a text file, a .jsonl file, a directory, or a data set id such as wikitext:wikitext-2-raw-v1:test"
        )
    config, split, column = (*rest, "", "", "")[:3]
    return DatasetId(name, config or None, split or DatasetId.split, column or DatasetId.column)


def hub_documents(source: str, note: Note, max_characters: int = MAX_CHARACTERS) -> list[Document]:
    """Read the first rows of a data set on the hub until they reach ``max_characters``. Raises DataError."""
    data = parse_dataset_id(source)
    documents: list[Document] = []
    characters = 0
    for row, record in enumerate(_stream_rows(data)):
        if characters >= max_characters:
            note(f"{data.name}: read the first {row} rows, {characters} characters")
            break
        documents.append(Document(f"{data.name}[{row}]", _column_text(data, row, record)))
        characters += len(documents[-1].text)
    return documents


def _stream_rows(data: DatasetId) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"there is no file or directory {data.name}; if it is a data set on the Hugging Face hub, "
            "install what reads it: pip install 'tide-llm[datasets]'"
        ) from error
    try:
        yield from datasets.load_dataset(data.name, data.config, split=data.split, streaming=True)
    except Exception as error:  # the package passes through any exception of its many file systems and formats
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"cannot read the data set {data.name} (config {data.config or 'default'}, split {data.split}): {reason}; "
            "check its name and the network, or download it and give the files"
        ) from error


def _column_text(data: DatasetId, row: int, record: dict[str, Any]) -> str:
    text = record.get(data.column)
    if not isinstance(text, str):
        raise DataError(
            f"{data.name}[{row}] has no text in the column {data.column!r}; its columns are {', '.join(record)}; "
            f"name one: {data.name}:{data.config or ''}:{data.split}:COLUMN"
        )
    return text
