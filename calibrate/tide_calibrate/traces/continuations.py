"""What users will generate: the model's own greedy continuations of held-out prompts.

A model agrees with itself at other places in what it writes than in what people wrote, so speed is predicted on these.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import DataError
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from tide_calibrate.parallel import Check, in_parallel
from tide_calibrate.text.documents import SPLITS, Windows
from tide_calibrate.traces.trace import OwnText, SplitTrace

PROMPT_TOKENS = 64
ROWS = 32  # prompts continued at once


def continue_prompts(
    model: PreTrainedModel, windows: Windows, split: NDArray[np.int8], count: int, new_tokens: int
) -> tuple[Windows, NDArray[np.int32]]:
    """Greedy continuations of the beginnings of ``count`` windows, half from the threshold split, half from the test split.

    Args:
        split: [documents] int8, each document's split.
        new_tokens: of each continuation; at most half a window, and fewer when the model ends its text.

    Returns:
        Prompts with their continuations as windows, and the prompts' lengths [count]. Raises DataError when there are no
        windows as long as a prompt.
    """
    width = windows.tokens.shape[1]
    new_tokens = min(new_tokens, width // 2)
    length = min(PROMPT_TOKENS, width - new_tokens)
    rows = _prompt_rows(windows, split, count, length)
    parts = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    jobs = [partial(_greedy, model, windows.tokens[part, :length], new_tokens) for part in parts]
    tokens = np.concatenate(list(in_parallel(jobs)))
    lengths = length + _tokens_until_end(tokens[:, length:], _end_tokens(model))
    tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] = 0
    return Windows(tokens, lengths, windows.document[rows]), np.full(len(rows), length, np.int32)


def generated_tokens(trace: SplitTrace, own: Windows, prompt_lengths: NDArray[np.int32]) -> SplitTrace:
    """The part of ``trace`` where the model decided a token of its continuation, with the texts that it wrote.

    ``own``, ``prompt_lengths``: as `continue_prompts` returned them.
    """
    _, starts, inverse = np.unique(trace.window, return_index=True, return_inverse=True)
    position = np.arange(trace.window.size) - starts[inverse]
    # The state at the prompt's last token makes the first new one; the one at the last token is never decoded.
    last = np.append(trace.window[1:] != trace.window[:-1], True)
    decided = trace.select((position >= prompt_lengths[trace.window] - 1) & ~last)
    whole = {w: own.tokens[w, : own.lengths[w]].astype(np.int64) for w in np.unique(decided.window).tolist()}
    return replace(decided, texts={w: OwnText(tokens, int(prompt_lengths[w])) for w, tokens in whole.items()})


def _prompt_rows(windows: Windows, split: NDArray[np.int8], count: int, length: int) -> NDArray[np.intp]:
    """Rows long enough to hold a prompt, half from the threshold split's documents and half from the test split's."""
    chosen = []
    for name in ("threshold", "test"):
        rows = np.flatnonzero((split[windows.document] == SPLITS.index(name)) & (windows.lengths >= length))
        if not len(rows):
            raise DataError(f"the {name} split has no window of {length} tokens to take a prompt from; give longer documents")
        chosen.append(_even_share(rows, windows.document[rows], count // 2))
    return np.concatenate(chosen)


def _even_share(rows: NDArray[np.intp], documents: NDArray[np.int32], count: int) -> NDArray[np.intp]:
    """``count`` of ``rows``, rising: as many of each document as of any other while it has more, evenly spread over it.

    Texts differ more between documents than within one, and the certificate counts each document alike too.
    """
    parts = [rows[documents == document] for document in np.unique(documents)]
    shares = np.zeros(len(parts), int)
    room = np.array([len(part) for part in parts])
    for _ in range(min(count, len(rows))):
        shares[np.where(shares < room, shares, count).argmin()] += 1
    picked = [part[np.linspace(0, len(part) - 1, share).round().astype(int)] for part, share in zip(parts, shares, strict=True)]
    return np.concatenate(picked)


@torch.inference_mode()
def _greedy(model: PreTrainedModel, prompts: NDArray[np.int32], new_tokens: int, check: Check) -> NDArray[np.int32]:
    """[B, P] → [B, P + new_tokens]; written out because ``generate`` would apply the model's own sampling settings."""
    step = torch.from_numpy(prompts).long()
    tokens, cache = [step], DynamicCache(config=model.config)
    for _ in range(new_tokens):
        check()
        step = model(input_ids=step, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(step)
    return torch.cat(tokens, dim=1).numpy().astype(np.int32)


def _end_tokens(model: PreTrainedModel) -> list[int]:
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _tokens_until_end(tokens: NDArray[np.int32], ends: list[int]) -> NDArray[np.int32]:
    """[B] int32, how many tokens come until the first end token, itself included; all of them without one."""
    ended = np.isin(tokens, ends)
    return np.where(ended.any(1), ended.argmax(1) + 1, tokens.shape[1]).astype(np.int32)
