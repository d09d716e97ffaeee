"""Interface of routers: a confidence score for the exit's prediction of each token."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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
