"""Interface of routers: a confidence score for the exit's prediction of each token."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Router(Protocol):
    """Scores tokens; ``kind`` names it in traces and in calibration.json."""

    kind: str

    def scores(self, states: Tensor, logits: Tensor) -> Tensor:
        """Scores [n] float32, 0 … 1, higher is more confident, given states [n, H] at the checkpoint and exit logits [n, V]."""
        ...
