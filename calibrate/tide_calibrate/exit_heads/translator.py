"""Low-rank residual map from the states at one depth to those at a later depth."""

from __future__ import annotations

import torch
from tide_runtime.errors import ParamsError
from torch import Tensor, nn
from torch.nn import functional as F

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
