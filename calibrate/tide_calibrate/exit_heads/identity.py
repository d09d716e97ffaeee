"""Exit head without parameters: the model's final norm and LM head applied to the state (logit lens)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tide_calibrate.exit_heads.base import ExitHead
from tide_calibrate.model.frozen import FrozenModel


class IdentityHead(ExitHead):
    """Final norm and LM head on the state after ``checkpoint`` layers."""

    def __init__(self, model: FrozenModel, checkpoint: int) -> None:
        super().__init__("identity", checkpoint, (checkpoint,))
        self.lm_head = model.lm_head

    def logits(self, states: Mapping[int, Tensor], vocabulary: Tensor | None = None) -> Tensor:
        return self.lm_head(self.translated(states), vocabulary)
