"""What a model of transformers writes, token by token. Its own ``generate`` would apply the sampling settings of the model."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor
from transformers import PreTrainedModel

TEMPERATURE = 0.7


def generate_tokens(model: PreTrainedModel, prompts: Tensor, new_tokens: int, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """[B, S + new_tokens] int64 on the model's device: ``prompts`` [B, S] and what follows.

    Args:
        choose: makes the next tokens [B, 1] of logits [B, V] in float32.
    """
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    ids = step = prompts.long().to(model.device)
    cache = None
    for _ in range(new_tokens):
        output = model(input_ids=step, past_key_values=cache, use_cache=True, **last_only)
        cache = output.past_key_values  # the model's own: a looped one has more caches
        step = choose(output.logits[:, -1].float())
        ids = torch.cat([ids, step], 1)
    return ids


def sampled(logits: Tensor, random: torch.Generator) -> Tensor:
    """[B, 1]: tokens drawn at `TEMPERATURE` by their logits [B, V]."""
    return torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=random)


def text_ends(model: PreTrainedModel, ids: Tensor, first: int) -> Tensor:
    """[B]: places after the first token at ``first`` or later that ends a text, in ``ids`` [B, T]; T where there is none."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    ended = torch.isin(ids, torch.tensor([] if eos is None else eos, dtype=ids.dtype, device=ids.device))
    ended[:, :first] = False
    return torch.where(ended.any(1), ended.int().argmax(1) + 1, ids.shape[1])
