"""Base class of exit heads: hidden states after a checkpoint in, an estimate of the full model's logits out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from tide_calibrate.exit_heads.translator import Translator


class ExitHead(nn.Module, ABC):
    """Predicts the full model's token after ``checkpoint`` layers; only the head's own parameters require gradients.

    Args:
        kind: ``identity``, ``linear`` or ``tail:k``.
        checkpoint: layers run before the exit.
        boundaries: boundaries (in layers run) whose captured states ``logits`` reads.
        translator: applied to the state first; None for a head that reads the state unchanged.
    """

    def __init__(self, kind: str, checkpoint: int, boundaries: tuple[int, ...], translator: Translator | None = None) -> None:
        super().__init__()
        self.translator = translator
        self.kind, self.checkpoint, self.boundaries = kind, checkpoint, boundaries

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
