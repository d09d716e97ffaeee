"""Calibration text: documents split into training, threshold and test text, and cut into windows of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from tide_runtime.errors import DataError
from transformers import PreTrainedTokenizerFast as FastTokenizer

from tide_calibrate.config import CalibrationConfig
from tide_export.calibration.calibration_file import DataInfo
from tide_export.documents import Document, Note, load_documents
from tide_export.sources.loaded_model import LoadedModel
from tide_export.sources.source_tokenizer import check_embedded, prompt_prefix

SplitName = Literal["train", "threshold", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
FRACTIONS = (0.6, 0.2, 0.2)
MIN_WINDOW_TOKENS = 16
# Fewer tokens cannot certify 1% at 95% confidence, even without a single disagreement: ln 0.05 / ln 0.99 = 298.1.
MIN_SPLIT_TOKENS = 299


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

    def windows_of(self, max_windows: Mapping[SplitName, int | None]) -> Windows:
        """Windows spread evenly over their split. ``max_windows``: of each split, at most; None: all of them."""
        split = self.split[self.windows.document]
        kept = []
        for name, limit in max_windows.items():
            own = np.flatnonzero(split == SPLITS.index(name))
            count = len(own) if limit is None else min(limit, len(own))
            kept.append(own[np.linspace(0, len(own) - 1, count).round().astype(int)])
        chosen = np.sort(np.concatenate(kept))
        return Windows(self.windows.tokens[chosen], self.windows.lengths[chosen], self.windows.document[chosen])

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
    check_embedded(int(cut.tokens.max(initial=0)), loaded.model, source)
    return SplitText(documents, split, cut)


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
    prefix = prompt_prefix(tokenizer)
    pieces: list[tuple[int, list[int]]] = []
    for index, document in enumerate(documents):
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        step = length - len(prefix)
        parts = (prefix + ids[start : start + step] for start in range(0, len(ids), step))
        pieces.extend((index, part) for part in parts if len(part) >= MIN_WINDOW_TOKENS)
    pieces = [pieces[i] for i in _spread(split[[index for index, _ in pieces]], limit, seed)]
    _check_enough(pieces, split)
    return _pad(pieces, length)


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
