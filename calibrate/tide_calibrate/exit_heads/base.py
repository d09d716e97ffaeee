"""Exit heads: the base class, and the one that runs no layers of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tide_calibrate.model.frozen import FrozenModel


class ExitHead(nn.Module, ABC):
    """Predicts the full model's token after ``checkpoint`` layers; only the head's own parameters require gradients.

    Args:
        kind: ``identity``, ``linear``, ``tail:k`` or a package's.
        checkpoint: layers run before the exit.
        boundaries: boundaries (in layers run) whose captured states ``logits`` reads.
        translator: applied to the state first; None for a head that reads the state unchanged.
    """

    def __init__(self, kind: str, checkpoint: int, boundaries: tuple[int, ...], translator: nn.Module | None = None) -> None:
        super().__init__()
        self.translator = translator
        self.kind = kind
        self.checkpoint = checkpoint
        self.boundaries = boundaries

    @property
    def device(self) -> torch.device:
        """The device of its weights and of the model."""
        return next(self.parameters()).device

    def translated(self, states: Mapping[int, Tensor]) -> Tensor:
        """The states [B, T, H] at the checkpoint, after the translator if there is one."""
        state = states[self.checkpoint]
        return state if self.translator is None else self.translator(state)

    @abstractmethod
    def logits(self, states: Mapping[int, Tensor], vocabulary: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] float32, given the full model's states of whole windows, boundary → [B, T, H] float32.

        ``vocabulary``: compute those of these token ids [n] alone, [B, T, n].
        """

    def trained(self) -> list[nn.Parameter]:
        """The trainable parameters; empty for a head without any."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


class LensHead(ExitHead):
    """Final norm and LM head on the state after ``checkpoint`` layers, or on what a translator makes of it: the logit lens, and
    the tuned lens (Belrose et al. 2023, arXiv:2303.08112)."""

    def __init__(self, kind: str, model: FrozenModel, checkpoint: int, translator: nn.Module | None) -> None:
        super().__init__(kind, checkpoint, (checkpoint,), translator)
        self.lm_head = model.lm_head

    def logits(self, states: Mapping[int, Tensor], vocabulary: Tensor | None = None) -> Tensor:
        return self.lm_head(self.translated(states), vocabulary)
