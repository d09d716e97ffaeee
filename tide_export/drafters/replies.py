"""The model's own replies, on which a drafter is measured: guesses meet what the model writes, not what people wrote.

The prompts are pieces of the Python language reference, which every Python carries (`tide_export.quantize.head_bits` reads it
too), in the model's chat template if it has one, so that an import needs no text of the user's. A model without a tokenizer
gets random ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tide_export.model.boundaries import at_boundaries
from tide_export.sources.loaded_model import LoadedModel

REPLIES = 16
PROMPT_TOKENS = 48
REPLY_TOKENS = 96
TEMPERATURE = 0.7
_PLACEHOLDER = "\ue000"


@dataclass(frozen=True)
class Replies:
    """Texts of T tokens: a prompt, a reply, and for each token what the model makes of it.

    Args:
        ids: [B, T] int64.
        first: place of the replies' first token.
        ends: [B], place behind the last token of each.
        likeliest: [B, T] the token that the model gives the largest logit after each.
        states: boundary → [B, T, H].
    """

    ids: Tensor
    first: int
    ends: Tensor
    likeliest: Tensor
    states: dict[int, Tensor]


def write_replies(
    loaded: LoadedModel,
    boundaries: Sequence[int],
    count: int = REPLIES,
    prompt_tokens: int = PROMPT_TOKENS,
    reply_tokens: int = REPLY_TOKENS,
    seed: int = 0,
    on_token: Callable[[int, int], None] = lambda done, all_tokens: None,
) -> Replies:
    """`reply_to` for ``count`` prompts of ``prompt_tokens`` tokens each, without the chat template's."""
    prompts = _prompts(loaded, count, prompt_tokens, reply_tokens, seed)
    return reply_to(prompts, loaded, boundaries, reply_tokens, seed, on_token)


@torch.inference_mode()
def reply_to(
    prompts: Tensor,
    loaded: LoadedModel,
    boundaries: Sequence[int],
    reply_tokens: int,
    seed: int = 0,
    on_token: Callable[[int, int], None] = lambda done, all_tokens: None,
) -> Replies:
    """Let the model, whose parameters are in memory, go on with ``prompts`` [B, S], sampled at `TEMPERATURE`.

    Args:
        boundaries: layers run before each state that is kept.
        on_token: called with the tokens of each reply written and all of them.
    """
    ids = _continued(loaded.model, prompts, reply_tokens, seed, on_token)
    kept: dict[int, list[Tensor]] = {boundary: [] for boundary in boundaries}
    likeliest = []

    def keep(boundary: int, state: Tensor) -> None:
        if boundary in kept:
            kept[boundary].append(state)

    with at_boundaries(loaded.model, keep):
        for row in ids.split(1):  # the logits of one text are enough to hold
            likeliest.append(loaded.model(input_ids=row, use_cache=False).logits.argmax(-1))
    states = {boundary: torch.cat(parts) for boundary, parts in kept.items()}
    return Replies(ids, prompts.shape[1], _ends(ids, prompts.shape[1], loaded), torch.cat(likeliest), states)


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
    room = (getattr(text, "max_position_embeddings", None) or 1 << 20) - reply_tokens - len(before) - len(after)
    tokens = max(1, min(tokens, room))
    if tokenizer is None:
        return torch.from_numpy(random.integers(0, text.vocab_size, (count, tokens)))
    words = tokenizer("\n\n".join(topics[topic] for topic in sorted(topics)), add_special_tokens=False)["input_ids"]
    starts = random.integers(0, max(1, len(words) - tokens), count)
    return torch.tensor([[*before, *words[start : start + tokens], *after] for start in starts])


def _continued(
    model: PreTrainedModel, prompts: Tensor, new_tokens: int, seed: int, on_token: Callable[[int, int], None]
) -> Tensor:
    """[B, T]: the prompts and ``new_tokens`` sampled tokens of each."""
    random = torch.Generator().manual_seed(seed)
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    ids = prompts
    step = prompts
    cache = None
    for done in range(new_tokens):
        output = model(input_ids=step, past_key_values=cache, use_cache=True, **last_only)
        cache = output.past_key_values
        step = torch.multinomial((output.logits[:, -1].float() / TEMPERATURE).softmax(-1), 1, generator=random)
        ids = torch.cat([ids, step], 1)
        on_token(done + 1, new_tokens)
    return ids


def _ends(ids: Tensor, first: int, loaded: LoadedModel) -> Tensor:
    """[B]: places behind the tokens that end a reply, or behind the last one."""
    config = loaded.model.generation_config
    eos = config.eos_token_id if config is not None else None
    ended = torch.isin(ids, torch.tensor([] if eos is None else eos, dtype=ids.dtype))
    ended[:, :first] = False
    return torch.where(ended.any(1), ended.int().argmax(1) + 1, ids.shape[1])
