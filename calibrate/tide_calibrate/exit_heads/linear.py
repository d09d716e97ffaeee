"""Exit head that translates the state to an estimate of the final state, then applies the model's own LM head (tuned lens)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tide_calibrate.exit_heads.base import ExitHead
from tide_calibrate.exit_heads.translator import Translator
from tide_calibrate.model.frozen import FrozenModel


class LinearHead(ExitHead):
    """Translator, then final norm and LM head (Belrose et al. 2023, arXiv:2303.08112)."""

    def __init__(self, model: FrozenModel, checkpoint: int, translator: Translator) -> None:
        super().__init__("linear", checkpoint, (checkpoint,), translator)
        self.lm_head = model.lm_head

    def logits(self, states: Mapping[int, Tensor], vocabulary: Tensor | None = None) -> Tensor:
        return self.lm_head(self.translated(states), vocabulary)
