"""The exit that needs no training: the state goes straight to the model's final norm and LM head."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tide_calibrate.exit_heads.base import ExitHead
from tide_calibrate.model.frozen import FrozenModel


class IdentityHead(ExitHead):
    """Final norm and LM head on the state after ``checkpoint`` layers (logit lens)."""

    def __init__(self, model: FrozenModel, checkpoint: int) -> None:
        super().__init__("identity", checkpoint, (checkpoint,))
        self.lm_head = model.lm_head

    def logits(self, states: Mapping[int, Tensor]) -> Tensor:
        return self.lm_head(self.translated(states))
