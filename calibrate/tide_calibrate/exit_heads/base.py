"""What every exit head is: hidden states after a checkpoint in, logits as if the model had gone on out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from tide_calibrate.exit_heads.translator import Translator


class ExitHead(nn.Module, ABC):
    """An early guess after ``checkpoint`` layers. Whatever requires a gradient is the head's own; the model is frozen.

    Args:
        kind: ``identity``, ``linear``, ``tail:k`` or ``block:k``.
        checkpoint: layers run before the exit.
        boundaries: captured states that ``logits`` reads, by layers run.
        translator: what the state passes first; None for a head that takes it as it is.
    """

    def __init__(self, kind: str, checkpoint: int, boundaries: tuple[int, ...], translator: Translator | None = None) -> None:
        super().__init__()
        self.translator = translator
        self.kind, self.checkpoint, self.boundaries = kind, checkpoint, boundaries

    def translated(self, states: Mapping[int, Tensor]) -> Tensor:
        """The states [B, T, H] at the checkpoint, after the translator if there is one."""
        here = states[self.checkpoint]
        return here if self.translator is None else self.translator(here)

    @abstractmethod
    def logits(self, states: Mapping[int, Tensor]) -> Tensor:
        """float32 [B, T, V] from the true states of whole windows: boundary → float32 [B, T, H]."""

    def trained(self) -> list[nn.Parameter]:
        """The parameters that training may change; none for a head that needs no training."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]
