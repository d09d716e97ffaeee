"""Routers score whether a token may stop at a checkpoint. ``mlp`` is trained; the others here use the exit head's logits."""

from __future__ import annotations

import math
from typing import Protocol

from torch import Tensor

from tide_export.graphs.exit_modules import MlpRouter


class Router(Protocol):
    """Scores tokens; ``kind`` names it in traces and in calibration.json."""

    kind: str

    def scores(self, states: Tensor, logits: Tensor, total: Tensor) -> Tensor:
        """Scores [n] float32, 0 … 1, higher is more confident.

        Args:
            states: [n, H] at the checkpoint.
            logits: [n, V] of the exit, or those of some tokens.
            total: [n], their logsumexp, over all V in any case.
        """
        ...


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


TRAINING_FREE: tuple[Router, ...] = (MaxProbability(), Entropy())

__all__ = ["TRAINING_FREE", "Entropy", "MaxProbability", "MlpRouter", "Router"]
