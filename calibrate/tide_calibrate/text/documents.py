"""Calibration text: read documents from files or the Hugging Face hub, split them by document, cut them into token windows.

Text that cannot be read is an error with a remedy; it is never replaced by other text.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from tide_runtime.errors import DataError
from transformers import PreTrainedTokenizerFast as FastTokenizer

from tide_calibrate.config import CalibrationConfig
from tide_export.calibration.calibration_file import DataInfo
from tide_export.load import LoadedModel

SplitName = Literal["train", "threshold", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
FRACTIONS = (0.6, 0.2, 0.2)
TEXT_SUFFIXES = (".txt", ".md", ".py", ".json", ".jsonl", ".csv")
MIN_WINDOW_TOKENS = 16
# Fewer tokens cannot certify 1% at 95% confidence, even without a single disagreement: ln 0.05 / ln 0.99 = 298.1.
MIN_SPLIT_TOKENS = 299
# 2,000 windows of 256 tokens are about 2 MB of English text; a multiple of that leaves a choice, and bounds endless web crawls.
MAX_CHARACTERS = 32_000_000

Note = Callable[[str], None]
_log: Note = logging.getLogger("tide_calibrate").warning


@dataclass(frozen=True)
class Document:
    """One text; ``name`` is its source (a path, ``file.jsonl:line``, or ``dataset[row]``)."""

    name: str
    text: str


@dataclass(frozen=True)
class Windows:
    """N windows of up to T tokens, in document order, padded with 0 on the right.

    Args:
        tokens: [N, T] int32.
        lengths: [N] int32, number of valid tokens.
        document: [N] int32, index of the document.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    document: NDArray[np.int32]

    @property
    def total_tokens(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True)
class SplitText:
    """Documents with their splits and windows.

    Args:
        split: [documents] int8, index into ("train", "threshold", "test").
        windows: windows of all documents.
    """

    documents: list[Document]
    split: NDArray[np.int8]
    windows: Windows

    def info(self, source: str, seed: int) -> DataInfo:
        """Counts and hashes of each split, for calibration.json."""
        per_window = self.split[self.windows.document]
        parts = {name: np.flatnonzero(self.split == i) for i, name in enumerate(SPLITS)}
        return DataInfo(
            source,
            seed,
            documents={name: len(part) for name, part in parts.items()},
            tokens={name: int(self.windows.lengths[per_window == i].sum()) for i, name in enumerate(SPLITS)},
            sha256={name: digest([self.documents[d] for d in part]) for name, part in parts.items()},
        )


def read_text(source: str, loaded: LoadedModel, config: CalibrationConfig, note: Note) -> SplitText:
    """Read, split and tokenize the text in ``source``. Raises DataError when it is missing, unreadable or too short."""
    documents = load_documents(source, note)
    if loaded.tokenizer is None:
        raise DataError(f"{loaded.source} has no fast tokenizer (tokenizer.json), so text cannot be cut into its tokens; add one")
    split = split_documents(documents, config.seed)
    cut = windows(documents, split, loaded.tokenizer, config.window, config.max_windows, config.seed)
    return SplitText(documents, split, cut)


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


def digest(documents: Sequence[Document]) -> str:
    """SHA-256 over the documents' texts, independent of their order and names; recorded in the certificate."""
    return hashlib.sha256("".join(sorted(_content_hash(d) for d in documents)).encode()).hexdigest()


def split_documents(documents: Sequence[Document], seed: int = 0, fractions: Sequence[float] = FRACTIONS) -> NDArray[np.int8]:
    """Assign each document to train, threshold or test so that each split has about its fraction of the text.

    Documents are assigned in an order given by ``seed`` and their content, each to the split that lacks the most bytes.
    Duplicates of a text share a split, so that no test text occurs in the training text.

    Returns [documents] int8, index into ("train", "threshold", "test"). Raises DataError with fewer than 3 different documents.
    """
    sizes: dict[str, int] = {}
    for document in documents:
        content = _content_hash(document)
        sizes[content] = sizes.get(content, 0) + len(document.text.encode())
    if len(sizes) < len(SPLITS):
        raise DataError(
            f"found {len(sizes)} different documents, but at least {len(SPLITS)} are needed: one each for "
            f"{', '.join(SPLITS)}; give a directory of files, or a .jsonl file with one text a line"
        )
    order = sorted(sizes, key=lambda content: hashlib.sha256(f"{seed}{content}".encode()).digest())
    chosen = _balance([sizes[content] for content in order], fractions)
    split = dict(zip(order, chosen, strict=True))
    return np.array([split[_content_hash(d)] for d in documents], np.int8)


def windows(
    documents: Sequence[Document],
    split: NDArray[np.int8],
    tokenizer: FastTokenizer,
    length: int = 256,
    limit: int = 2000,
    seed: int = 0,
) -> Windows:
    """Cut documents into consecutive windows of ``length`` tokens; at most ``limit``, spread evenly over splits and documents.

    Every window begins with the special tokens that the tokenizer puts in front of a prompt (such as BOS). A document's last
    window may be shorter, and is dropped under 16 tokens. Raises DataError when a split gets fewer than 299 tokens.
    """
    prefix = _prompt_prefix(tokenizer)
    pieces: list[tuple[int, list[int]]] = []
    for index, document in enumerate(documents):
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        step = length - len(prefix)
        parts = (prefix + ids[start : start + step] for start in range(0, len(ids), step))
        pieces.extend((index, part) for part in parts if len(part) >= MIN_WINDOW_TOKENS)
    pieces = [pieces[i] for i in _spread(split[[index for index, _ in pieces]], limit, seed)]
    _check_enough(pieces, split)
    return _pad(pieces, length)


# --- files


def _read_file(path: Path) -> list[Document]:
    text = _read_text(path)
    if text is None:
        raise DataError(f"{path} is not UTF-8 text; give text, code or .jsonl, or convert it (iconv -t utf-8)")
    return _parse_documents(path.name, text)


def _read_directory(directory: Path, note: Note) -> list[Document]:
    documents: list[Document] = []
    for path in _files_below(directory):
        name, text = path.relative_to(directory).as_posix(), _read_text(path)
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


# --- splits


def _content_hash(document: Document) -> str:
    return hashlib.sha256(document.text.encode()).hexdigest()


def _balance(sizes: Sequence[int], fractions: Sequence[float]) -> list[int]:
    """Assign each item, in order, to the split furthest below its share; the last items fill splits that are still empty."""
    missing = np.array(fractions, float) * sum(sizes)
    empty = np.ones(len(fractions), bool)
    chosen = []
    for index, size in enumerate(sizes):
        must_fill = len(sizes) - index <= empty.sum()
        split = int(np.argmax(np.where(empty, missing, -np.inf) if must_fill else missing))
        missing[split] -= size
        empty[split] = False
        chosen.append(split)
    return chosen


# --- windows


def _prompt_prefix(tokenizer: FastTokenizer) -> list[int]:
    """The special tokens that the tokenizer puts in front of a prompt."""
    with_special, plain = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    starts = (i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain)
    return with_special[: next(starts, 0)]


def _spread(split: NDArray[np.int8], limit: int, seed: int) -> list[int]:
    """Choose at most ``limit`` indices, ascending: equally spaced in the order of splits, from a seeded start."""
    if len(split) <= limit:
        return list(range(len(split)))
    order = np.argsort(split, kind="stable")
    start = np.random.default_rng(seed).random()
    return sorted(order[((np.arange(limit) + start) * len(split) / limit).astype(int)].tolist())


def _check_enough(pieces: Sequence[tuple[int, list[int]]], split: NDArray[np.int8]) -> None:
    found = [sum(len(piece) for index, piece in pieces if split[index] == s) for s in range(len(SPLITS))]
    if min(found) < MIN_SPLIT_TOKENS:
        counts = ", ".join(f"{count} tokens to {name}" for name, count in zip(SPLITS, found, strict=True))
        raise DataError(
            f"too little text: it gives {counts}, but each split needs at least {MIN_SPLIT_TOKENS} "
            f"(in windows of {MIN_WINDOW_TOKENS} tokens or more); give more or longer documents"
        )


def _pad(pieces: Sequence[tuple[int, list[int]]], length: int) -> Windows:
    tokens = np.zeros((len(pieces), length), np.int32)
    for row, (_, piece) in enumerate(pieces):
        tokens[row, : len(piece)] = piece
    lengths = np.array([len(piece) for _, piece in pieces], np.int32)
    return Windows(tokens, lengths, np.array([index for index, _ in pieces], np.int32))
