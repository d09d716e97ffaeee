"""Exit heads: the base class, the translator that most of them begin with, and the two that run no layers of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from tide_runtime.errors import ParamsError
from torch import Tensor, nn
from torch.nn import functional as F

from tide_calibrate.model.frozen import FrozenModel

MAX_RANK = 128
RMS_EPSILON = 1e-6


class Translator(nn.Module):
    """Computes h + up @ (down @ rmsnorm(h)), rmsnorm without weight; ``up`` starts at 0, so the map starts as the identity.

    The tuned lens (Belrose et al. 2023, arXiv:2303.08112, equation 8) with a low-rank matrix and a normed input.

    Args:
        hidden: H. ``down`` is [rank, H], ``up`` [H, rank].
        rank: 1 … 128, capped at H.
        seed: seed of ``down``'s initialization.
    """

    def __init__(self, hidden: int, rank: int = MAX_RANK, seed: int = 0) -> None:
        super().__init__()
        if not 1 <= rank <= MAX_RANK:
            raise ParamsError(f"the translator's rank must lie in 1 … {MAX_RANK}, got {rank}")
        rank = min(rank, hidden)
        generator = torch.Generator().manual_seed(seed)
        self.down = nn.Parameter(torch.randn((rank, hidden), generator=generator) * hidden**-0.5)
        self.up = nn.Parameter(torch.zeros(hidden, rank))

    def forward(self, states: Tensor) -> Tensor:
        """Map states [..., H] to [..., H], float32."""
        normed = F.rms_norm(states, states.shape[-1:], eps=RMS_EPSILON)
        return states + F.linear(F.linear(normed, self.down), self.up)


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


class IdentityHead(ExitHead):
    """Final norm and LM head on the state after ``checkpoint`` layers: the logit lens, without parameters."""

    def __init__(self, model: FrozenModel, checkpoint: int) -> None:
        super().__init__("identity", checkpoint, (checkpoint,))
        self.lm_head = model.lm_head

    def logits(self, states: Mapping[int, Tensor], vocabulary: Tensor | None = None) -> Tensor:
        return self.lm_head(self.translated(states), vocabulary)


class LinearHead(ExitHead):
    """Translator, then final norm and LM head: the tuned lens (Belrose et al. 2023, arXiv:2303.08112)."""

    def __init__(self, model: FrozenModel, checkpoint: int, translator: Translator) -> None:
        super().__init__("linear", checkpoint, (checkpoint,), translator)
        self.lm_head = model.lm_head

    def logits(self, states: Mapping[int, Tensor], vocabulary: Tensor | None = None) -> Tensor:
        return self.lm_head(self.translated(states), vocabulary)
