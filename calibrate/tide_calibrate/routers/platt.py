"""The scaling that calibrates the scores of the MLP router."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_NEWTON_STEPS = 50
_RIDGE = 1e-6  # keeps the Hessian invertible when all log-odds are equal
_MIN_SLOPE, _MAX_SLOPE = 0.01, 10.0  # positive, so that noise in a small sample never inverts a router


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
