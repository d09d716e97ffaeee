"""What every router is: it looks at a token after a checkpoint and scores how surely the early guess can be trusted."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Router(Protocol):
    """Scores tokens; ``kind`` names it in traces and in calibration.json."""

    kind: str

    def scores(self, states: Tensor, logits: Tensor) -> Tensor:
        """[n] float32, 0 … 1, higher means surer, from states [n, H] at the checkpoint and the exit head's logits [n, V]."""
        ...
