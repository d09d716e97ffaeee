"""Routers that need no training because they read the exit head's own distribution; to ask them, the head must be run."""

from __future__ import annotations

import math

from torch import Tensor


class MaxProbability:
    """The probability of the exit head's likeliest token (softmax response in CALM, Schuster et al. 2022, section 3.1)."""

    kind = "max_probability"

    def scores(self, states: Tensor, logits: Tensor) -> Tensor:
        return (logits.max(-1).values - logits.logsumexp(-1)).exp()


class Entropy:
    """1 - H / ln V: 1 when the exit head puts everything on one token, 0 when all tokens are alike."""

    kind = "entropy"

    def scores(self, states: Tensor, logits: Tensor) -> Tensor:
        log_probabilities = logits.log_softmax(-1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        return (1 - entropy / math.log(logits.shape[-1])).clamp(0, 1)
