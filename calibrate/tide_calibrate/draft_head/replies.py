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
from inspect import signature

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
from tide_export.sources.loaded_model import LoadedModel

PROMPT_TOKENS = 64
REPLY_TOKENS = 128
_BATCH = 48
_TOP_K = 16
_TEMPERATURE = 0.7


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
    positions = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    room = positions - len(before) - len(after)
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
    tokens, states, top_ids, top_logits, total = (np.concatenate(part) for part in zip(*parts, strict=True))
    lengths = _lengths(tokens, loaded)
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
) -> tuple[NDArray[np.int32], NDArray[np.float16], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """Tokens [B, 1 + T] from the prompts' last one on, and for each the states [B, 1 + T, boundaries, H], the largest
    logits and the logarithm of the sum of all. The model's hooks append to ``kept.states``, once for each boundary."""
    model = loaded.model
    random = torch.Generator(loaded.model.device).manual_seed(seed)
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    states = kept.states = list[Tensor]()
    step = torch.from_numpy(prompts).to(model.device)
    tokens = [step[:, -1:]]
    tops = []
    sums = []
    cache = None
    for _ in range(new_tokens):
        check()
        output = model(input_ids=step, past_key_values=cache, use_cache=True, **last_only)
        logits, cache = output.logits[:, -1].float(), output.past_key_values  # the model's own: a looped one has more caches
        tops.append(logits.topk(_TOP_K))
        sums.append(logits.logsumexp(-1))
        step = torch.multinomial((logits / _TEMPERATURE).softmax(-1), 1, generator=random)
        tokens.append(step)
        on_batch(len(prompts))
    return (
        torch.cat(tokens[:-1], 1).int().cpu().numpy(),
        torch.stack(states, 1).unflatten(1, (-1, boundaries)).cpu().numpy(),
        torch.stack([top.indices for top in tops], 1).int().cpu().numpy(),
        torch.stack([top.values for top in tops], 1).cpu().numpy(),
        torch.stack(sums, 1).cpu().numpy(),
    )


def _lengths(tokens: NDArray[np.int32], loaded: LoadedModel) -> NDArray[np.int32]:
    """Tokens up to the end of each reply, [B]; the prompt's last token may be one that ends turns."""
    config = loaded.model.generation_config
    eos = config.eos_token_id if config is not None else None
    ends = np.isin(tokens, [] if eos is None else eos)
    ends[:, 0] = False
    return np.where(ends.any(1), ends.argmax(1), tokens.shape[1]).astype(np.int32)
