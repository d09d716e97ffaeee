"""The reference's greedy tokens: equality with the model, alignment with the traces, and references that do not fit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from export.architectures import VOCAB, tiny_model
from tide_calibrate.capture.capture import capture
from tide_calibrate.capture.reference import capture_reference, check_same_tokens
from tide_calibrate.exit_heads import make_head
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.text.documents import Windows
from tide_calibrate.traces.record import trace_split
from tide_runtime.errors import CalibrationError

from tide_export.load import fingerprint
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

SPLIT = np.array([0, 1, 2, 1], np.int8)
QUIET = ExportProgress(quiet=True)


def text() -> Windows:
    """12 windows of 16 to 24 tokens from four documents, two of them in the threshold split."""
    random = np.random.default_rng(0)
    lengths = random.integers(16, 25, 12).astype(np.int32)
    tokens = random.integers(3, VOCAB, (12, 24)).astype(np.int32)
    tokens[np.arange(24) >= lengths[:, None]] = 0
    return Windows(tokens, lengths, np.repeat(np.arange(4, dtype=np.int32), 3))


def rounded() -> LoadedModel:
    """A copy of the tiny Llama with coarsely rounded weights."""
    model = tiny_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            step = parameter.abs().max() / 3
            parameter.copy_((parameter / step).round() * step)
    return LoadedModel(model, None, "rounded")


def test_a_trace_compares_with_the_references_token_at_the_same_place(tmp_path: Path) -> None:
    """A window or position off by one would certify agreement with another text's tokens."""
    original, model, windows = LoadedModel(tiny_model("llama"), None, "tiny"), rounded(), text()
    reference = capture_reference(original, windows, SPLIT, "threshold", tmp_path / "reference", QUIET)
    assert (reference.name, reference.sha256) == ("the fp32 original tiny", fingerprint(original))
    captured = capture(model, windows, SPLIT, [3, 4], tmp_path / "states")
    frozen = FrozenModel(model.model)
    heads = {(3, "tail:1"): make_head("tail:1", frozen, 3)}  # untranslated, it is the whole model
    trace = trace_split(captured, "threshold", frozen.lm_head, heads, {}, reference=reference)
    expected = []
    for row in (3, 4, 5, 9, 10, 11):
        ids = torch.from_numpy(windows.tokens[row : row + 1, : windows.lengths[row]]).long()
        with torch.no_grad():
            theirs, ours = (one.model(input_ids=ids, use_cache=False).logits[0].argmax(-1) for one in (original, model))
        expected.append((theirs == ours).numpy())
    assert trace.full_agrees is not None
    assert trace.full_agrees.tolist() == np.concatenate(expected).tolist()
    assert 0 < trace.full_agrees.mean() < 1
    assert (trace.exits[3, "tail:1"].agrees == trace.full_agrees).mean() > 0.95  # states are stored in half precision
    assert trace.select(np.arange(5)).full_agrees is not None
    own = trace_split(captured, "threshold", frozen.lm_head, heads, {})
    assert own.full_agrees is None and own.exits[3, "tail:1"].agrees.mean() > 0.95


def test_other_windows_than_the_references_are_refused(tmp_path: Path) -> None:
    """The test split would be compared with tokens of the threshold split; and the dequantised weights of a GGUF file are not the
    checkpoint that it was made from."""
    stored: Any = {"lm_head.weight": object()}
    model, windows = replace(rounded(), source="tiny.gguf", quantized=stored), text()
    reference = capture_reference(model, windows, SPLIT, "threshold", tmp_path / "reference", QUIET)
    assert reference.name == "the dequantised weights of tiny.gguf"
    captured = capture(model, windows, SPLIT, [4], tmp_path / "states")
    with pytest.raises(CalibrationError, match="has not run on these windows"):
        trace_split(captured, "test", FrozenModel(model.model).lm_head, {}, {}, reference=reference)


def test_a_reference_with_another_vocabulary_is_refused() -> None:
    """Token ids of another tokenizer would differ everywhere, and the reason would look like bad weights."""

    def tokenizer(words: str) -> Any:
        return SimpleNamespace(convert_ids_to_tokens=lambda ids: [f"{words}{i}" for i in ids])

    original: Any = SimpleNamespace(source="org/other", tokenizer=tokenizer("a"))
    with pytest.raises(
        CalibrationError, match=r"org/other has another vocabulary than mine: token 0 is 'a0' there and 'b0' here"
    ):
        check_same_tokens(original, "mine", tokenizer("b"), text())
    check_same_tokens(original, "mine", tokenizer("a"), text())
