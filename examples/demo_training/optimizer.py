"""Muon for the stacked matrices, AdamW for embeddings and norms, and the learning rate over the steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .model import MATRICES, StackedLlama

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic coefficients, Jordan et al. 2024 ("Muon")


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of a stack `[L, rows, columns]`, by Newton-Schulz iteration in bf16."""
    a, b, c = NEWTON_SCHULZ
    tall = update.shape[1] > update.shape[2]
    x = update.bfloat16().mT if tall else update.bfloat16()
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).contiguous()
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al. 2024), for parameters `[L, out, in]`: each layer's matrix by itself."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                self.update(weight, weight.grad, group)

    def update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """One step of one stack; the update's spectral norm is lr · sqrt(max(1, out/in))."""
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        nesterov = gradient.lerp(state["momentum"], group["momentum"])
        scale = max(1.0, weight.shape[1] / weight.shape[2]) ** 0.5
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(orthogonalize(nesterov), alpha=-group["lr"] * scale)


def build_optimizers(model: StackedLlama, matrix_lr: float, vector_lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon and AdamW over disjoint parameters; each group keeps its peak rate in `peak_lr` for the schedule."""
    matrices = [model.get_parameter(name) for name in MATRICES]
    vectors = [weight for name, weight in model.named_parameters() if name not in MATRICES]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=matrix_lr, weight_decay=weight_decay),
        torch.optim.AdamW(vectors, lr=vector_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


@dataclass(frozen=True)
class Schedule:
    """Warmup-stable-decay learning rate (Hu et al. 2024, MiniCPM): linear warm-up, constant, linear decay to zero. In steps.

    The decay can start when the time is up, and a later training can continue from the checkpoint before it.
    """

    total: int
    warmup: int
    decay: int

    def __post_init__(self) -> None:
        if self.total < 0 or self.warmup < 0 or self.decay < 0:
            raise ValueError("schedule: total, warmup and decay must not be negative")

    @property
    def planned_decay_start(self) -> int:
        return max(self.total - self.decay, 0)

    def factor(self, step: int, decay_start: int | None) -> float:
        """Share of the peak rate at `step` (from 0); `decay_start` is where the decay began, if it has."""
        rate = min(1.0, (step + 1) / (self.warmup + 1))
        if decay_start is not None:
            rate *= max(0.0, 1 - (step - decay_start) / max(self.decay, 1))
        return rate

    def finished(self, step: int, decay_start: int | None) -> bool:
        """Whether all steps are done: at the end of the decay, wherever it began."""
        return step >= self.total if decay_start is None else step >= decay_start + self.decay
