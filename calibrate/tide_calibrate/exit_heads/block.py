"""Exit head with trained layers of its own: a fine-tuned copy of the last k layers (Kangaroo, arXiv:2404.18911).

It attends only over its own keys and values, computed from translated states at every position, so it needs no keys and values
of the skipped layers. The cost is k layers of weights and of training per checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from tide_calibrate.exit_heads.base import ExitHead
from tide_calibrate.exit_heads.translator import Translator
from tide_calibrate.model.frozen import FrozenModel


class BlockHead(ExitHead):
    """Translator, trained copy of the last ``layers`` layers, then the model's own final norm and LM head."""

    def __init__(self, model: FrozenModel, checkpoint: int, layers: int, translator: Translator) -> None:
        super().__init__(f"block:{layers}", checkpoint, (checkpoint,), translator)
        self.block = model.copied_tail(layers)

    @property
    def layers(self) -> list[nn.Module]:
        """The trained layers, first to last."""
        return self.block.layers

    def logits(self, states: Mapping[int, Tensor], vocabulary: Tensor | None = None) -> Tensor:
        return self.block(self.translated(states), vocabulary=vocabulary)
