"""A router that needs both a likely token and an unlike rest: max probability · (1 - entropy / ln V)."""

from __future__ import annotations

import math

from torch import Tensor, nn


class ConfidenceEntropy(nn.Module):
    """Nothing to train. It scores the logits of the exit's head, so it is run after the head."""

    reads_logits = True

    def __init__(self, hidden: int, seed: int = 0) -> None:
        super().__init__()

    def scores(self, states: Tensor, logits: Tensor, total: Tensor) -> Tensor:
        """Scores [...], 0 … 1, of logits [..., V] with the logsumexp ``total`` [...]; the states [..., H] are not used."""
        log_probabilities = logits - total[..., None]
        confidence = log_probabilities.amax(-1).exp()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        return confidence * (1 - entropy / math.log(logits.shape[-1])).clamp(0, 1)
