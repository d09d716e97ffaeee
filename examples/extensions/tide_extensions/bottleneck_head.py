"""An exit head with a nonlinear bottleneck: h + up · gelu(down · rmsnorm(h)), to which the model's own head is then applied."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BottleneckHead(nn.Module):
    """``down`` is [W, H], ``up`` [H, W] with W = H / 8, at least 4; ``up`` starts at 0, so the map starts as the identity."""

    def __init__(self, hidden: int, seed: int = 0) -> None:
        super().__init__()
        width = max(4, hidden // 8)
        generator = torch.Generator().manual_seed(seed)
        self.down = nn.Parameter(torch.randn((width, hidden), generator=generator) * hidden**-0.5)
        self.up = nn.Parameter(torch.zeros(hidden, width))

    def forward(self, states: Tensor) -> Tensor:
        """Map states [..., H] to [..., H]."""
        normed = F.rms_norm(states, states.shape[-1:], eps=1e-6)
        return states + F.linear(F.gelu(F.linear(normed, self.down)), self.up)
