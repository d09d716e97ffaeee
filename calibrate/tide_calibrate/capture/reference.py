"""Greedy tokens of the model that a certificate compares with, on the text that the calibrated model is traced on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import CalibrationError
from torch import Tensor
from transformers import PreTrainedTokenizerFast as FastTokenizer

from tide_calibrate.capture.capture import capture
from tide_calibrate.text.documents import SPLITS, SplitName, Windows
from tide_export.load import fingerprint
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel


@dataclass(frozen=True)
class ReferenceTokens:
    """The reference's likeliest next token at every token of some windows; teacher-forced, so the text before it is the same.

    Args:
        name: the reference in words, as certificates state it.
        sha256: fingerprint of its weights.
        windows: [W] int64, indices of the windows among all of the text, ascending.
        tokens: [W, T] int32, memory-mapped; values beyond a window's length are meaningless.
    """

    name: str
    sha256: str
    windows: NDArray[np.int64]
    tokens: NDArray[np.int32]

    def read(self, windows: NDArray[np.int64], valid: Tensor) -> Tensor:
        """Tokens [n] int64 of ``windows`` [B] at the positions that ``valid`` [B, T'] marks, on its device.

        Raises CalibrationError where a window is not among those that the reference has run.
        """
        if not np.isin(windows, self.windows).all():
            raise CalibrationError(f"the reference {self.name} has not run on these windows; trace the split it has run on")
        rows = self.tokens[np.searchsorted(self.windows, windows), : valid.shape[1]]
        return torch.from_numpy(rows.astype(np.int64)).to(valid.device)[valid]


def capture_reference(
    original: LoadedModel, text: Windows, split: NDArray[np.int8], part: SplitName, directory: Path, progress: ExportProgress
) -> ReferenceTokens:
    """Run ``original`` over the windows of the split ``part``; an interrupted run resumes in ``directory``.

    Args:
        text: windows of all splits, the calibrated model's own.
        split: [documents] int8, each document's split.

    Raises what `capture` raises.
    """
    chosen = np.flatnonzero(split[text.document] == SPLITS.index(part))
    kept = Windows(text.tokens[chosen], text.lengths[chosen], text.document[chosen])
    captured = capture(original, kept, split, [], directory, top_k=1, progress=progress)
    stored = "the dequantised weights of" if original.quantized else "the fp32 original"
    return ReferenceTokens(f"{stored} {original.name}", fingerprint(original), chosen, captured.top_ids[:, :, 0])


def check_same_tokens(original: LoadedModel, name: str, tokenizer: FastTokenizer | None, text: Windows) -> None:
    """Raise CalibrationError unless the token ids in ``text`` mean the same to the reference and to the model called ``name``.

    A reference without a tokenizer is taken at its word: a wrong one differs at nearly every token, and nothing is certified.
    """
    if original.tokenizer is None or tokenizer is None:
        return
    ids = np.unique(text.tokens).tolist()
    theirs, ours = (one.convert_ids_to_tokens(ids) for one in (original.tokenizer, tokenizer))
    differ = [(i, our, their) for i, our, their in zip(ids, ours, theirs, strict=True) if our != their]
    if differ:
        number, our, their = differ[0]
        raise CalibrationError(
            f"the reference {original.source} has another vocabulary than {name}: token {number} is {their!r} there and {our!r} "
            "here; give the checkpoint that the model was made from"
        )
