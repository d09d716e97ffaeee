"""The model's own replies, with the states and logits that it wrote them with: what drafts meet.

Half of the prompts are pieces of the training text, in the model's chat template if it has one. A model with one writes the other
half itself: after the template's beginning it goes on with what a user may say, the reply to it, and so on (Magpie, Xu et
al. 2024, arXiv:2406.08464). A head of SmolLM2 that learned from replies to pieces of Python's documentation guessed 14% of such
conversations right; one that learned from both, as many tokens in all, 27%, and the replies to documentation as well as before.
Replies are sampled. States and logits are those of generation itself, so that replies need no capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import DataError
from torch import Tensor

from tide_calibrate.capture.batches import in_batches
from tide_calibrate.capture.forward_pass import hidden_states
from tide_calibrate.capture.store import Capture
from tide_calibrate.parallel import Check, in_parallel, workers_on
from tide_calibrate.text.documents import SplitText, Windows
from tide_export.drafters.replies import template_tokens
from tide_export.model.generate import generate_tokens, sampled, text_ends
from tide_export.sources.loaded_model import LoadedModel

PROMPT_TOKENS = 64
REPLY_TOKENS = 128
_BATCH = 48
_TOP_K = 16


@dataclass(frozen=True)
class Replies:
    """``capture``: windows of the prompt's last token and the reply; ``first_positions`` [N]: of that token in its text."""

    capture: Capture
    first_positions: NDArray[np.int64]


def write_replies(
    loaded: LoadedModel,
    text: SplitText,
    boundaries: Sequence[int],
    count: int,
    seed: int,
    on_batch: Callable[[int], None] = lambda _: None,
) -> Replies:
    """Let the model write ``count`` replies.

    Args:
        boundaries: layers run before each state that is kept.
        on_batch: called with the number of tokens written.

    Raises DataError where no window has a prompt's tokens.
    """
    before, after = template_tokens(loaded)
    own = count // 2 if before else 0
    room = (loaded.positions or 1 << 20) - len(before) - len(after)
    piece_tokens = min(PROMPT_TOKENS, text.windows.tokens.shape[1] // 2, room // 2)
    pieces = _prompts(text.windows, text.split, before, after, piece_tokens, count - own, seed)
    new_tokens = min(REPLY_TOKENS, room - piece_tokens)
    groups = [*in_batches(pieces, _BATCH), *in_batches(np.tile(np.array(before, np.int64), (own, 1)), _BATCH)]
    kept = threading.local()  # ``states`` of the thread: batches are written in several, by one model
    jobs = [
        partial(_reply, loaded, kept, group, new_tokens, len(boundaries), seed + number, on_batch)
        for number, group in enumerate(groups)
    ]
    # Registered before the threads start: torch's modules are not to be given hooks while they run.
    with hidden_states(loaded.model, sorted(boundaries), lambda _, state: kept.states.append(state[:, -1].half())):
        parts = list(in_parallel(jobs, workers_on(loaded.model.device)))
    tokens, lengths, states, top_ids, top_logits, total = (np.concatenate(part) for part in zip(*parts, strict=True))
    lengths[len(pieces) :] = tokens.shape[1]  # conversations go on after the end of a turn
    capture = Capture(
        tokens=tokens,
        lengths=lengths,
        document=np.arange(len(tokens), dtype=np.int32),
        split=np.zeros(len(tokens), np.int8),
        hidden={boundary: states[:, :, place] for place, boundary in enumerate(boundaries)},
        hidden_dtype="float16",
        top_ids=top_ids,
        top_logits=top_logits,
        logsumexp=total,
        num_layers=loaded.num_layers,
    )
    return Replies(capture, np.concatenate([np.full(len(group), group.shape[1] - 1) for group in groups]))


def _prompts(
    windows: Windows, split: NDArray[np.int8], before: list[int], after: list[int], tokens: int, count: int, seed: int
) -> NDArray[np.int64]:
    """[count, …]: pieces of the training text, of ``tokens`` tokens each, in the template."""
    fitting = np.flatnonzero((split[windows.document] == 0) & (windows.lengths >= tokens))
    if not len(fitting):
        raise DataError(f"the train split has no window of {tokens} tokens to take a prompt from; give longer documents")
    random = np.random.default_rng(seed)
    chosen = random.permutation(np.resize(random.permutation(fitting), count))
    starts = random.integers(0, windows.lengths[chosen] - tokens + 1)
    pieces = [windows.tokens[w, s : s + tokens] for w, s in zip(chosen, starts, strict=True)]
    return np.stack([np.concatenate([before, piece, after]) for piece in pieces]).astype(np.int64)


@torch.inference_mode()
def _reply(
    loaded: LoadedModel,
    kept: threading.local,
    prompts: NDArray[np.int64],
    new_tokens: int,
    boundaries: int,
    seed: int,
    on_batch: Callable[[int], None],
    check: Check,
) -> tuple[NDArray[Any], ...]:
    """Tokens [B, 1 + T] from the prompts' last one on, those up to the end of each reply [B], and for each token the states
    [B, 1 + T, boundaries, H], the largest logits and the logarithm of the sum of all. The model's hooks append to
    ``kept.states``, once for each boundary."""
    model = loaded.model
    random = torch.Generator(model.device).manual_seed(seed)
    states = kept.states = list[Tensor]()
    tops = []
    sums = []

    def choose(logits: Tensor) -> Tensor:
        check()
        tops.append(logits.topk(_TOP_K))
        sums.append(logits.logsumexp(-1))
        on_batch(len(prompts))
        return sampled(logits, random)

    ids = generate_tokens(model, torch.from_numpy(prompts), new_tokens, choose)
    first = prompts.shape[1]
    parts = (
        ids[:, first - 1 : -1].int(),
        (text_ends(model, ids, first) - first).int(),
        torch.stack(states, 1).unflatten(1, (-1, boundaries)),
        torch.stack([top.indices for top in tops], 1).int(),
        torch.stack([top.values for top in tops], 1),
        torch.stack(sums, 1),
    )
    return tuple(part.cpu().numpy() for part in parts)
