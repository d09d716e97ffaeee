"""Greedy continuations of held-out prompts, on which speed is predicted.

Exits agree with the full model at other positions of generated text than of human-written text.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import DataError
from torch import Tensor
from transformers import PreTrainedModel

from tide_calibrate.capture.batches import in_batches
from tide_calibrate.parallel import Check, in_parallel, workers_on
from tide_calibrate.text.documents import SPLITS, Windows
from tide_calibrate.traces.trace import SplitTrace
from tide_export.model.generate import generate_tokens, text_ends

PROMPT_TOKENS = 64
BATCH_SIZE = 32  # prompts per forward pass


def continue_prompts(
    model: PreTrainedModel, windows: Windows, split: NDArray[np.int8], count: int, new_tokens: int
) -> tuple[Windows, NDArray[np.int32]]:
    """Continue the beginnings of ``count`` windows greedily, half from the threshold split, half from the test split.

    Args:
        split: [documents] int8, each document's split.
        new_tokens: tokens per continuation; capped at half a window, fewer after an end token.

    Returns:
        Prompts with their continuations as windows, and the prompts' lengths [count]. Raises DataError when there are no
        windows as long as a prompt.
    """
    window_length = windows.tokens.shape[1]
    new_tokens = min(new_tokens, window_length // 2)
    prompt_length = min(PROMPT_TOKENS, window_length - new_tokens)
    chosen = _choose_windows(windows, split, count, prompt_length)
    batches = in_batches(chosen, BATCH_SIZE)
    jobs = [partial(_greedy, model, windows.tokens[batch, :prompt_length], new_tokens) for batch in batches]
    tokens = np.concatenate(list(in_parallel(jobs, workers_on(model.device))))
    lengths = text_ends(model, torch.from_numpy(tokens), prompt_length).numpy().astype(np.int32)
    tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] = 0
    return Windows(tokens, lengths, windows.document[chosen]), np.full(len(chosen), prompt_length, np.int32)


def generated_tokens(trace: SplitTrace, prompt_lengths: NDArray[np.int32]) -> SplitTrace:
    """Restrict ``trace`` to positions whose output is a generated token. ``prompt_lengths``: see `continue_prompts`."""
    _, starts, inverse = np.unique(trace.window, return_index=True, return_inverse=True)
    position = np.arange(trace.window.size) - starts[inverse]
    # The state at the prompt's last token predicts the first new token; the state at the last token predicts none that is kept.
    last = np.append(trace.window[1:] != trace.window[:-1], True)
    return trace.select((position >= prompt_lengths[trace.window] - 1) & ~last)


def _choose_windows(windows: Windows, split: NDArray[np.int8], count: int, prompt_length: int) -> NDArray[np.intp]:
    """Indices of windows that hold a prompt, half from the threshold split and half from the test split."""
    chosen = []
    for name in ("threshold", "test"):
        fitting = np.flatnonzero((split[windows.document] == SPLITS.index(name)) & (windows.lengths >= prompt_length))
        if not len(fitting):
            raise DataError(
                f"the {name} split has no window of {prompt_length} tokens to take a prompt from; give longer documents"
            )
        chosen.append(_balance_documents(fitting, windows.document[fitting], count // 2))
    return np.concatenate(chosen)


def _balance_documents(windows: NDArray[np.intp], documents: NDArray[np.int32], count: int) -> NDArray[np.intp]:
    """Choose ``count`` of the indices ``windows``, equally many per document as far as they reach, evenly spread over each.

    Texts differ more between documents than within one, and the certificate weighs documents equally as well.
    """
    parts = [windows[documents == document] for document in np.unique(documents)]
    shares = np.zeros(len(parts), int)
    room = np.array([len(part) for part in parts])
    for _ in range(min(count, len(windows))):
        shares[np.where(shares < room, shares, count).argmin()] += 1
    picked = [part[np.linspace(0, len(part) - 1, share).round().astype(int)] for part, share in zip(parts, shares, strict=True)]
    return np.concatenate(picked)


@torch.inference_mode()
def _greedy(model: PreTrainedModel, prompts: NDArray[np.int32], new_tokens: int, check: Check) -> NDArray[np.int32]:
    """Greedy decoding, [B, P] → [B, P + new_tokens]."""

    def choose(logits: Tensor) -> Tensor:
        check()
        return logits.argmax(-1, keepdim=True)

    return generate_tokens(model, torch.from_numpy(prompts), new_tokens, choose).cpu().numpy().astype(np.int32)
