"""Python source of this installation as token streams: which files, which are held out, which windows a step reads."""

import hashlib
import json
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

SMALLEST_FILE, LARGEST_FILE = 400, 300_000  # bytes
# tests, code tables, copies of other packages, and setuptools' fork of the standard library's distutils
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "testing", "encodings", "pydoc_data", "__pycache__",
                   "_vendor", "vendor", "_vendored", "_distutils", "unicode"}  # fmt: skip
PACKAGE_BYTES = 4_000_000  # no single package may dominate site-packages


@dataclass(frozen=True)
class SourceFile:
    """A file of the corpus: where it lies below its library folder, and its text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        return is_held_out(self.path)


def is_held_out(path: str) -> bool:
    """Whether a file, named by its path relative to the library folder, is kept from training (1 in 20)."""
    return int(hashlib.sha1(path.encode()).hexdigest(), 16) % 20 == 0


def library_folders() -> dict[str, Path]:
    """The folders of the standard library and of this environment's site-packages."""
    return {"stdlib": Path(sysconfig.get_path("stdlib")), "site-packages": Path(sysconfig.get_path("purelib"))}


def python_files(folder: Path) -> Iterator[SourceFile]:
    """Source files below `folder` in a fixed order, without duplicates, tests and generated tables."""
    seen: set[bytes] = set()
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if SKIPPED_FOLDERS & set(relative.parts) or not SMALLEST_FILE <= path.stat().st_size <= LARGEST_FILE:
            continue
        content = path.read_bytes()
        digest = hashlib.sha1(content).digest()
        if digest in seen:
            continue
        seen.add(digest)
        try:
            yield SourceFile(relative.as_posix(), content.decode("utf-8"))
        except UnicodeDecodeError:
            continue  # a source file in another encoding: not worth guessing


def long_lines(file: SourceFile) -> list[str]:
    return [line.strip() for line in file.text.splitlines() if len(line.strip()) >= 30]


def without_copies(files: list[SourceFile], originals: list[SourceFile]) -> list[SourceFile]:
    """Drop files of which more than a third of the long lines occur in `originals` (backports, forks)."""
    known = {line for file in originals for line in long_lines(file)}
    kept = []
    for file in files:
        lines = long_lines(file)
        if sum(line in known for line in lines) <= len(lines) / 3:
            kept.append(file)
    return kept


def capped_by_package(files: list[SourceFile], limit: int = PACKAGE_BYTES) -> list[SourceFile]:
    """At most `limit` characters of each top-level package, chosen by hash of the path."""
    used: dict[str, int] = defaultdict(int)
    kept = []
    for file in sorted(files, key=lambda file: hashlib.sha1(file.path.encode()).digest()):
        package = file.path.split("/")[0]
        if used[package] + len(file.text) <= limit:
            used[package] += len(file.text)
            kept.append(file)
    return kept


def library_files() -> dict[str, list[SourceFile]]:
    """The corpus by stream; site-packages without near-copies of held-out standard-library files."""
    folders = library_folders()
    stdlib = list(python_files(folders["stdlib"]))
    packages = capped_by_package(list(python_files(folders["site-packages"])))
    held_out = [file for file in stdlib if file.held_out]
    return {"stdlib": stdlib, "site-packages": without_copies(packages, held_out)}


def encode(files: list[SourceFile], tokenizer: Tokenizer) -> np.ndarray:
    """Token ids (uint16) of the files, token 0 (`<|endoftext|>`) before each."""
    parts: list[np.ndarray] = []
    for start in range(0, len(files), 64):
        texts = [file.text for file in files[start : start + 64]]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            parts.append(np.array([0, *encoding.ids], dtype=np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint16)


@dataclass(frozen=True)
class Corpus:
    """Token streams by name: what is trained on, and what is held out."""

    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]

    @classmethod
    def from_files(cls, files: dict[str, list[SourceFile]], tokenizer: Tokenizer) -> "Corpus":
        """Encode the files, split by `is_held_out`."""
        train = {name: encode([f for f in of if not f.held_out], tokenizer) for name, of in files.items()}
        held_out = {name: encode([f for f in of if f.held_out], tokenizer) for name, of in files.items()}
        return cls(train, held_out)

    @classmethod
    def cached(cls, tokenizer_file: Path, cache: Path) -> "Corpus":
        """The corpus of this installation; encoded once and kept in `cache` under the files' fingerprint."""
        files = library_files()
        listing = json.dumps([tokenizer_file.read_text(), {name: [f.path for f in of] for name, of in files.items()}])
        target = cache / f"corpus-{hashlib.sha1(listing.encode()).hexdigest()[:12]}.npz"
        if not target.exists():
            corpus = cls.from_files(files, Tokenizer.from_file(str(tokenizer_file)))
            cache.mkdir(parents=True, exist_ok=True)
            splits = {"train": corpus.train, "held_out": corpus.held_out}
            arrays: dict[str, Any] = {f"{split}/{name}": of[name] for split, of in splits.items() for name in of}
            np.savez(target, **arrays)
        with np.load(target) as stored:
            return cls(*({name: stored[f"{split}/{name}"] for name in files} for split in ("train", "held_out")))


def window_starts(tokens: int, length: int, first: int, count: int, seed: int) -> list[int]:
    """Starts of the windows `first … first + count - 1` of an endless walk through a stream.

    Each epoch visits non-overlapping windows of `length` tokens in an order and with an offset of its own, so that
    the batch of a step depends on the step's number alone and a resumed run reads what an uninterrupted one reads.
    """
    per_epoch = tokens // length - 1
    if per_epoch < 1:
        raise ValueError(f"a stream of {tokens} tokens is too short for windows of {length}; use shorter sequences")
    starts = []
    for epoch in range(first // per_epoch, (first + count - 1) // per_epoch + 1):
        generator = np.random.default_rng([seed, epoch])
        offset = generator.integers(length)
        order = generator.permutation(per_epoch)
        here = range(max(first, epoch * per_epoch), min(first + count, (epoch + 1) * per_epoch))
        starts += [int(offset + length * order[number - epoch * per_epoch]) for number in here]
    return starts


def training_batch(corpus: Corpus, step: int, batch: int, length: int, stdlib_share: float, seed: int) -> np.ndarray:
    """Token windows `[batch, length + 1]` of one step, a fixed number of them from the standard library."""
    from_stdlib = batch if not len(corpus.train.get("site-packages", ())) else round(batch * stdlib_share)
    counts = {"stdlib": from_stdlib, "site-packages": batch - from_stdlib}
    windows = []
    for salt, (name, count) in enumerate(counts.items()):
        if count:
            stream = corpus.train[name]
            starts = window_starts(len(stream) - 1, length, step * count, count, seed * len(counts) + salt)
            windows += [stream[start : start + length + 1] for start in starts]
    return np.stack(windows).astype(np.int64)
