"""The final norm and LM head of any model: what turns a state into logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tide_export.trace import decoder_layers

from .model_tail import ModelTail


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
