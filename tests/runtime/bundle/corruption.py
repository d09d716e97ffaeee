"""Ways to harm a bundle, and how a harmed one has to be refused: with an error that says what to do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import pytest
from tide_runtime import Engine, EngineOptions, ThreadOptions, TideError

FIXES = ("export", "tide-export", "upgrade", "copy", "add it", "do not load", "give the folder")
WEIGHTS, SEGMENT, LAST, HEAD = "onnx/weights.bin", *(f"onnx/cpu.{name}.onnx" for name in ("segment_1", "segment_2", "head"))
PICKLE_MARK = "unpickled"
Harm = Callable[[Path], Path | None]


@dataclass(frozen=True)
class Corruption:
    """``harm`` changes the copied bundle; if it returns a path, that is loaded instead. ``words``: of the error's message."""

    name: str
    harm: Harm
    error: type[TideError]
    words: tuple[str, ...]
    options: EngineOptions | None = None

    def check_refused(self, bundle_copy: Path) -> None:
        directory = self.harm(bundle_copy) or bundle_copy
        with pytest.raises(TideError) as caught:
            Engine.load(directory, self.options or EngineOptions(threads=ThreadOptions(1)))
        message = str(caught.value)
        assert type(caught.value) is self.error, message
        assert all(word in message for word in self.words), message
        assert any(fix in message.lower() for fix in FIXES), message
        assert not (bundle_copy.parent / PICKLE_MARK).exists(), "a pickled file was executed"


@dataclass(frozen=True)
class Corruptions:
    """A decorator that collects the corruptions of a file."""

    cases: list[Corruption] = field(default_factory=list)

    def __call__(self, error: type[TideError], *words: str, options: EngineOptions | None = None) -> Callable[[Harm], Harm]:
        def register(harm: Harm) -> Harm:
            self.cases.append(Corruption(harm.__name__, harm, error, words, options))
            return harm

        return register


def edit(bundle: Path, *path: str | int, value: Any = None, remove: bool = False) -> None:
    """Set or remove one value of the manifest."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    place = manifest
    for key in path[:-1]:
        place = place[key]
    if remove:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def sign(bundle: Path, name: str) -> None:
    """Update the manifest's hash and size of a changed file."""
    content = (bundle / name).read_bytes()
    edit(bundle, "files", name, value={"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)})


def rename_tensor(bundle: Path, file: str, old: str, new: str) -> None:
    model = onnx.load(bundle / file, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        value.name = new if value.name == old else value.name
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    onnx.save(model, bundle / file)
    sign(bundle, file)
