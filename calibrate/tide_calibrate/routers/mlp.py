"""MLP router: a small network on the hidden state, evaluated before the exit head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROUTER_WIDTH = 128
RMS_EPSILON = 1e-6


class MlpRouter(nn.Module):
    """Computes sigmoid(up · silu(down @ rmsnorm(h) + down_bias) + up_bias), rmsnorm without weight.

    Args:
        hidden: H. ``down`` is [R, H], ``down_bias`` [R], ``up`` [R], ``up_bias`` [1].
        width: R.
        seed: seed of the initialization; ``up`` starts at 0, so that every score starts at ½.
        kind: name of the scores in traces.
    """

    def __init__(self, hidden: int, width: int = ROUTER_WIDTH, seed: int = 0, kind: str = "mlp") -> None:
        super().__init__()
        self.kind = kind
        generator = torch.Generator().manual_seed(seed)
        self.down = nn.Parameter(torch.randn((width, hidden), generator=generator) * hidden**-0.5)
        self.down_bias = nn.Parameter(torch.zeros(width))
        self.up = nn.Parameter(torch.zeros(width))
        self.up_bias = nn.Parameter(torch.zeros(1))

    def forward(self, states: Tensor) -> Tensor:
        """Log-odds [n] of the score for states [n, H]."""
        normed = F.rms_norm(states, states.shape[-1:], eps=RMS_EPSILON)
        return F.silu(F.linear(normed, self.down, self.down_bias)) @ self.up + self.up_bias

    def scores(self, states: Tensor, logits: Tensor | None = None, total: Tensor | None = None) -> Tensor:
        """Probability [n] that the exit's token is right; the exit head's logits are not needed."""
        return self(states).sigmoid()

    @torch.no_grad()
    def rescale(self, slope: float, offset: float) -> None:
        """Fold the map z → ``slope`` · z + ``offset`` of the log-odds into the last layer's weights."""
        self.up.mul_(slope)
        self.up_bias.mul_(slope).add_(offset)
