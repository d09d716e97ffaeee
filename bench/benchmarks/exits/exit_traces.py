"""Traces of a model's exits on held-out text, by the calibration's own steps: capture, train, trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tide_calibrate.capture.capture import capture
from tide_calibrate.exit_heads import make_head
from tide_calibrate.exit_heads.train import train_head
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.routers import MaxProbability
from tide_calibrate.text.documents import SplitName, split_documents, windows
from tide_calibrate.traces.record import trace_split
from tide_calibrate.traces.trace import SplitTrace

from benchmarks.models.model_folders import DEMO_MODELS
from examples.demo_data import held_out_files
from examples.demo_training.corpus import library_folders, python_files
from tide_export.documents import Document, load_documents
from tide_export.load import load_model

ROUTER = "max_probability"
FRACTIONS = (0.4, 0.15, 0.45)  # certificates are judged on threshold and test documents together
HELD_OUT: tuple[SplitName, ...] = ("threshold", "test")


def held_out_documents(data: str) -> list[Document]:
    """``demo``: the files that the demo's calibration learns from. ``library``: all Python files of this installation that the
    demo models were not trained on. Else a path or data set.
    """
    if data == "demo":
        return [Document(file.path, file.text) for file in held_out_files()]
    if data != "library":
        return load_documents(data)
    folders = library_folders().items()
    return [Document(f"{name}/{file.path}", file.text) for name, root in folders for file in python_files(root) if file.held_out]


def exit_traces(
    model: str, data: str, checkpoints: Sequence[int], head: str, limit: int, work: Path
) -> tuple[SplitTrace, list[SplitTrace]]:
    """The trace of the training documents, and those of the threshold and test documents.

    Args:
        model: ``layerskip``, ``stock`` or ``looped``.
        head: kind of the exit heads, trained on the training documents where there is something to train.
        limit: windows of 256 tokens in all.
        work: folder for the capture.
    """
    loaded = load_model(str(DEMO_MODELS / model), "fp32")
    documents = held_out_documents(data)
    assert loaded.tokenizer is not None
    split = split_documents(documents, fractions=FRACTIONS)
    cut = windows(documents, split, loaded.tokenizer, limit=limit)
    frozen = FrozenModel(loaded.model)
    heads = {(checkpoint, head): make_head(head, frozen, checkpoint) for checkpoint in checkpoints}
    states = {boundary for one in heads.values() for boundary in one.boundaries} | {frozen.num_layers}
    captured = capture(loaded, cut, split, sorted(states), work)
    for one in heads.values():
        train_head(one, captured)
    routers = {exit: [MaxProbability()] for exit in heads}

    def trace(part: SplitName) -> SplitTrace:
        return trace_split(captured, part, frozen.lm_head, heads, routers)

    return trace("train"), [trace(part) for part in HELD_OUT]
