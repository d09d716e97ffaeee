"""Training-free routers: confidence scores of the exit head's distribution, available once the head has run."""

from __future__ import annotations

import math

from torch import Tensor


class MaxProbability:
    """Probability of the exit head's likeliest token (softmax response in CALM, Schuster et al. 2022, section 3.1)."""

    kind = "max_probability"

    def scores(self, states: Tensor, logits: Tensor, total: Tensor) -> Tensor:
        return (logits.amax(-1) - total).exp()


class Entropy:
    """Normalized negative entropy 1 - H / ln V: 1 for a one-hot distribution of the exit head, 0 for a uniform one."""

    kind = "entropy"

    def scores(self, states: Tensor, logits: Tensor, total: Tensor) -> Tensor:
        log_probabilities = logits.log_softmax(-1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        return (1 - entropy / math.log(logits.shape[-1])).clamp(0, 1)
