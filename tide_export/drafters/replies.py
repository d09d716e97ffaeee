"""The model's own replies, on which a drafter is measured: guesses meet what the model writes, not what people wrote.

The prompts are pieces of the Python language reference, which every Python carries (`tide_export.quantize.head_bits` reads it
too), in the model's chat template if it has one, so that an import needs no text of the user's. A model without a tokenizer
gets random ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

from tide_export.model.boundaries import at_boundaries
from tide_export.model.generate import generate_tokens, sampled, text_ends
from tide_export.sources.loaded_model import LoadedModel

REPLIES = 16
PROMPT_TOKENS = 48
REPLY_TOKENS = 96
_PLACEHOLDER = "\ue000"


@dataclass(frozen=True)
class Replies:
    """Texts of T tokens: a prompt, a reply, and for each token what the model makes of it.

    Args:
        ids: [B, T] int64.
        first: place of the replies' first token.
        ends: [B], place behind the last token of each.
        argmax: [B, T] the token that the model gives the largest logit after each.
        states: boundary → [B, T, H].
    """

    ids: Tensor
    first: int
    ends: Tensor
    argmax: Tensor
    states: dict[int, Tensor]


@torch.inference_mode()
def write_replies(
    loaded: LoadedModel,
    boundaries: Sequence[int],
    count: int = REPLIES,
    prompt_tokens: int = PROMPT_TOKENS,
    reply_tokens: int = REPLY_TOKENS,
    seed: int = 0,
    on_token: Callable[[int, int], None] = lambda done, all_tokens: None,
) -> Replies:
    """Let the model, whose parameters are in memory, go on with ``count`` prompts, sampled.

    Args:
        boundaries: layers run before each state that is kept.
        prompt_tokens: of each prompt, without those of the chat template.
        on_token: called with the tokens of each reply written and all of them.
    """
    prompts = _prompts(loaded, count, prompt_tokens, reply_tokens, seed)
    first = prompts.shape[1]
    random = torch.Generator().manual_seed(seed)
    written = itertools.count(1)

    def choose(logits: Tensor) -> Tensor:
        on_token(next(written), reply_tokens)
        return sampled(logits, random)

    ids = generate_tokens(loaded.model, prompts, reply_tokens, choose)
    kept: dict[int, list[Tensor]] = {boundary: [] for boundary in boundaries}
    argmax = []

    def keep(boundary: int, state: Tensor) -> None:
        if boundary in kept:
            kept[boundary].append(state)

    with at_boundaries(loaded.model, keep):
        for row in ids.split(1):  # the logits of one text are enough to hold
            argmax.append(loaded.model(input_ids=row, use_cache=False).logits.argmax(-1))
    states = {boundary: torch.cat(parts) for boundary, parts in kept.items()}
    return Replies(ids, first, text_ends(loaded.model, ids, first), torch.cat(argmax), states)


def template_tokens(loaded: LoadedModel) -> tuple[list[int], list[int]]:
    """Token ids before and after what a user says, in the model's chat template; none where it has none."""
    tokenizer = loaded.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return [], []
    messages = [{"role": "user", "content": _PLACEHOLDER}]
    whole = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    before, _, after = whole.partition(_PLACEHOLDER)
    first, last = (list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, after))
    return first, last


def _prompts(loaded: LoadedModel, count: int, tokens: int, reply_tokens: int, seed: int) -> Tensor:
    """[count, …] token ids, of ``tokens`` each without the template."""
    text = loaded.model.config.get_text_config()
    tokenizer = loaded.tokenizer
    random = np.random.default_rng(seed)
    before, after = template_tokens(loaded)
    room = (loaded.positions or 1 << 20) - reply_tokens - len(before) - len(after)
    tokens = max(1, min(tokens, room))
    if tokenizer is None:
        return torch.from_numpy(random.integers(0, text.vocab_size, (count, tokens)))
    words = tokenizer("\n\n".join(topics[topic] for topic in sorted(topics)), add_special_tokens=False)["input_ids"]
    starts = random.integers(0, max(1, len(words) - tokens), count)
    return torch.tensor([[*before, *words[start : start + tokens], *after] for start in starts])
