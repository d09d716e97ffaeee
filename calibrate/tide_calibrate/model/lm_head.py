"""The final norm and LM head of any model: what turns a state into logits.

The full model's output, a few positions at a time: [B, T, V] logits never exist at once.

The model's own forward makes the logits (head, scaling, soft-cap and all). Its decoder stack runs once; after that its result
stands in for it, a slice of time for each forward, so this needs no knowledge of the architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tide_calibrate.model.tail import ModelTail
from tide_export.trace import decoder_layers


class LMHead(nn.Module):
    """Everything the model does after its last layer: final norm, LM head, soft-cap, logit scaling."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.tail = ModelTail(model, len(decoder_layers(model)))

    def forward(self, states: Tensor) -> Tensor:
        """Logits [..., V] of residual-stream states [..., H] before the final norm."""
        flat = states.reshape(1, -1, states.shape[-1])
        # No layer attends, so one row of positions and the smallest mask serve any number of tokens.
        positions = torch.zeros((1, flat.shape[1]), dtype=torch.long, device=flat.device)
        mask = torch.zeros((1, 1, 1, 1), dtype=self.tail.model.dtype, device=flat.device)
        return self.tail(flat, positions, mask).reshape(*states.shape[:-1], -1)


LOGIT_BYTES = 64 << 20  # of one slice in fp32; some models hold it three times over while they scale and cap it


def sliced_logits(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Run the model once on ids [B, T]; yield (first position, logits [B, n, V] float32) for slices of time, in order."""
    rows, positions = input_ids.shape
    step = max(1, LOGIT_BYTES // (4 * rows * model.config.get_text_config().vocab_size))
    stack, kept = _stack(model), []

    def keep_and_cut(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        kept.append(output)
        return _cut(output, 0, step)

    with stack.register_forward_hook(keep_and_cut):
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True).logits
    yield 0, logits.float()
    for start in range(step, positions, step):
        part = _cut(kept[0], start, start + step)
        with patch.object(stack, "forward", lambda *_, part=part, **__: part):
            logits = model(input_ids=input_ids[:, start : start + step], use_cache=False, return_dict=True).logits
        yield start, logits.float()


def _stack(model: PreTrainedModel) -> nn.Module:
    """The module that owns the decoder layers: embeddings in, final norm out."""
    layers = decoder_layers(model)
    return next(module for module in model.modules() if any(child is layers for child in module.children()))


def _cut(output: Any, start: int, end: int) -> Any:
    """A model output of the same class, of the positions ``start`` … ``end`` only."""
    return type(output)(last_hidden_state=output.last_hidden_state[:, start:end])
