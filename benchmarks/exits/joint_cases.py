"""Models whose weights are rounded and whose exits are certified against the model before: what is run, and on which text."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from tide_calibrate.text.documents import Document
from tide_calibrate.traces.trace import SplitTrace

from benchmarks.exits.exit_traces import held_out_documents, traces_of
from benchmarks.models.gguf_files import smollm2_file
from benchmarks.models.model_folders import DEMO_MODELS
from tide_export.load import load_model

CHARACTERS = 900  # of each text: about a window, because the certificate is about documents and not about their length
_NOT_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "lib2to3", "idlelib"}


@dataclass(frozen=True)
class JointCase:
    """A model, how its weights are rounded, and its exits.

    Args:
        source: finds what `load_model` reads; its weights in fp32 are the reference.
        weights: ``int8`` or ``int4``; every matrix is rounded, also those that the source keeps in low bits.
        documents: the text; nothing of it trained the model.
        head: kind of the exit heads.
        windows: of 256 tokens, in all.
        epsilons: the rates to certify.
    """

    source: Callable[[], Path]
    weights: str
    documents: Callable[[], list[Document]]
    head: str
    checkpoints: tuple[int, ...]
    windows: int
    epsilons: tuple[float, ...]

    def traces(self, work: Path) -> tuple[SplitTrace, list[SplitTrace]]:
        """The training documents' trace, and those of the held-out ones, whose agreement is with the reference.

        ``work``: folder for what the models compute; an interrupted run goes on from there.
        """
        loaded = load_model(str(self.source()), "fp32")
        return traces_of(loaded, self.documents(), self.checkpoints, self.head, self.windows, work, self.weights)


def prose() -> list[Document]:
    """Python's language reference, a document per topic, and the docstrings of the standard library, one per module."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (file for file in sorted(root.rglob("*.py")) if not _NOT_LIBRARY & set(file.relative_to(root).parts))
    texts = {file.relative_to(root).as_posix(): docstrings(file.read_bytes()) for file in files} | topics
    return [Document(name, text[:CHARACTERS]) for name, text in sorted(texts.items()) if len(text) >= CHARACTERS]


def docstrings(source: bytes) -> str:
    """All docstrings of a module, in order; empty where it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


def _smollm2(weights: str, epsilons: tuple[float, ...]) -> JointCase:
    return JointCase(smollm2_file, weights, prose, "identity", (24, 27), 240, epsilons)


JOINT_CASES = {
    "layerskip-int4": JointCase(
        lambda: DEMO_MODELS / "layerskip",
        "int4",
        lambda: held_out_documents("library"),
        "identity",
        (4, 8, 12, 16),
        400,
        (0.07, 0.1),
    ),
    "smollm2-int8": _smollm2("int8", (0.05, 0.1)),
    "smollm2-int4": _smollm2("int4", (0.3,)),
}
