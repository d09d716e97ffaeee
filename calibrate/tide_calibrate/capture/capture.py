"""Capture hidden states and logits in one pass of the unmodified model over the calibration text.

Results are written batch by batch, so memory does not grow with the text. An interrupted capture resumes where it stopped and
gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tide_runtime.errors import CalibrationError, ParamsError

from tide_calibrate.capture.batches import in_batches
from tide_calibrate.capture.forward_pass import EagerPass, ForwardPass
from tide_calibrate.capture.store import Capture, open_capture
from tide_calibrate.capture.writer import HIDDEN_DTYPES, CaptureSettings, CaptureWriter
from tide_calibrate.model.frozen import LOGIT_BYTES
from tide_calibrate.text.documents import Windows
from tide_export.load import fingerprint
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

BATCH_TOKENS = 2048  # a layer's activations roughly fit a core's cache; larger batches were no faster


def capture(
    loaded: LoadedModel,
    windows: Windows,
    split: NDArray[np.int8],
    candidates: Sequence[int],
    directory: Path,
    *,
    batch_size: int | None = None,
    top_k: int = 16,
    hidden_dtype: str = "float16",
    logit_bytes: int = LOGIT_BYTES,
    make_pass: Callable[[], ForwardPass] | None = None,
    progress: ExportProgress | None = None,
) -> Capture:
    """Run the model over all windows once; store hidden states after ``candidates`` layers and the ``top_k`` logits.

    Args:
        split: [documents] int8, each document's split.
        candidates: layers run, 0 … L; L is the state before the final norm. Empty: no states, logits alone.
        directory: created when missing. A capture begun there with the same model, windows and settings is resumed.
        batch_size: windows per forward pass; None: about 2,048 tokens' worth.
        logit_bytes: size of the fp32 logits that are held at once, by PyTorch.
        make_pass: makes what runs the windows, over ``candidates``, if any are left to run; None: PyTorch.

    Raises ParamsError for settings that do not fit the model, CalibrationError when ``directory`` holds another capture or the
    model gives NaN or infinities, OutputError when the disk is too small.
    """
    model = loaded.model.eval()
    _check(loaded, windows, candidates, top_k, hidden_dtype)
    batch_size = batch_size or max(1, BATCH_TOKENS // windows.tokens.shape[1])
    settings = CaptureSettings(
        model=fingerprint(loaded),
        data=_digest(windows, split),
        model_dtype=str(model.dtype).removeprefix("torch."),
        num_layers=loaded.num_layers,
        hidden_size=model.config.get_text_config().hidden_size,
        candidates=sorted(set(candidates)),
        hidden_dtype=hidden_dtype,
        top_k=top_k,
        batch_size=batch_size,
    )
    order = np.argsort(-windows.lengths, kind="stable")  # batches windows of similar length, which minimises padding
    batches = in_batches(order, batch_size)
    writer = CaptureWriter(directory, settings, windows, split)
    with writer.run(len(batches)) as done:
        tokens_done = sum(int(windows.lengths[indices].sum()) for indices in batches[:done])
        left = batches[done:]
        forward = make_pass() if make_pass is not None and left else EagerPass(model, settings.candidates, logit_bytes)
        with (progress or ExportProgress(quiet=True)).steps("capture", windows.total_tokens, tokens_done) as bar:
            for indices in left:
                lengths = windows.lengths[indices]
                with writer.batch(indices) as batch:
                    forward.run(windows.tokens[indices, : lengths.max()], lengths, batch)
                bar.advance(int(windows.lengths[indices].sum()))
    return open_capture(directory)


def _digest(windows: Windows, split: NDArray[np.int8]) -> str:
    sha = hashlib.sha256(str(windows.tokens.shape).encode())
    for array in (windows.tokens, windows.lengths, windows.document, split):
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def _check(loaded: LoadedModel, windows: Windows, candidates: Sequence[int], top_k: int, hidden_dtype: str) -> None:
    layers = loaded.num_layers
    text = loaded.model.config.get_text_config()
    if min(candidates, default=0) < 0 or max(candidates, default=0) > layers:
        raise ParamsError(f"candidates are {list(candidates)}; the model has {layers} layers: give layer counts 0 … {layers}")
    if hidden_dtype not in HIDDEN_DTYPES:
        raise ParamsError(f"hidden_dtype is {hidden_dtype!r}; give {' or '.join(HIDDEN_DTYPES)}")
    if not 1 <= top_k <= text.vocab_size:
        raise ParamsError(f"top_k is {top_k}; give 1 … {text.vocab_size}, the vocabulary's size")
    if windows.tokens.max(initial=0) >= text.vocab_size:
        raise CalibrationError(
            f"the text has the token id {windows.tokens.max()}, but the model's vocabulary ends at {text.vocab_size - 1}: "
            "the tokenizer belongs to another model; give the model's own"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and windows.lengths.max(initial=0) > positions:
        raise ParamsError(f"windows have {windows.lengths.max()} tokens; give at most {positions}, the model's limit")
