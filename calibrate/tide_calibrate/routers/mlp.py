"""MLP router: a small network on the hidden state, evaluated before the exit head, and the scaling that calibrates its scores."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

ROUTER_WIDTH = 128
RMS_EPSILON = 1e-6
_NEWTON_STEPS = 50
_RIDGE = 1e-6  # keeps the Hessian invertible when all log-odds are equal
_MIN_SLOPE, _MAX_SLOPE = 0.01, 10.0  # positive, so that noise in a small sample never inverts a router


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


def fit_platt(log_odds: NDArray[np.floating], right: NDArray[np.bool_]) -> tuple[float, float]:
    """Platt scaling: slope a and offset b that maximise the likelihood of ``right`` [n] under sigmoid(a · log_odds + b).

    The targets are (N₊+1)/(N₊+2) and 1/(N₋+2) instead of 1 and 0 (Platt 1999, equation 6), so the fit is finite even when all
    labels are equal.
    """
    z = np.stack([log_odds.astype(np.float64), np.ones(len(log_odds))], axis=1)
    positives = int(right.sum())
    target = np.where(right, (positives + 1) / (positives + 2), 1 / (len(right) - positives + 2))
    weights = np.array([1.0, 0.0])
    for _ in range(_NEWTON_STEPS):
        step = _newton_step(z, target, weights)
        weights = weights - step
        if np.abs(step).max() < 1e-9:
            break
    slope = float(np.clip(weights[0], _MIN_SLOPE, _MAX_SLOPE))
    return slope, float(weights[1]) if slope == weights[0] else _offset(z[:, 0] * slope, target)


def _newton_step(z: NDArray[np.float64], target: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.floating]:
    """Newton step, halved until the loss no longer increases: far from the optimum a full step can overshoot."""
    probability = _sigmoid(z @ weights)
    gradient = z.T @ (probability - target)
    curvature = (z * (probability * (1 - probability))[:, None]).T @ z + _RIDGE * np.eye(2)
    step = np.linalg.solve(curvature, gradient)
    loss = _loss(z @ weights, target)
    while np.abs(step).max() > 1e-9 and _loss(z @ (weights - step), target) > loss:
        step = step / 2
    return step


def _loss(log_odds: NDArray[np.float64], target: NDArray[np.float64]) -> float:
    return float((np.logaddexp(0, log_odds) - target * log_odds).sum())


def _offset(log_odds: NDArray[np.float64], target: NDArray[np.float64]) -> float:
    """Fit the offset alone by bisection, so that the mean probability equals the mean target."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(log_odds + middle).mean() < target.mean() else (low, middle)
    return (low + high) / 2


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-np.clip(x, -60, 60)))
