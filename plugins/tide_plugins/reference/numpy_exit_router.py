"""Reference of csrc/exit_router.cuh: the MLP router's score in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LARGEST_SQUARES = float(np.finfo(np.float32).max)


def exit_router(
    hidden: ArrayLike,
    down: ArrayLike,
    down_bias: ArrayLike,
    up: ArrayLike,
    up_bias: ArrayLike,
    *,
    epsilon: float = 1e-6,
) -> NDArray[np.float64]:
    """sigmoid(up · silu(down · rmsnorm(hidden) + down_bias) + up_bias): [N].

    A row whose sum of squares overflows float32 has the score NaN, as in the kernel.

    Args:
        hidden: [N, H].
        down, down_bias, up, up_bias: [R, H], [R], [R], [1].
        epsilon: the norm's epsilon (Zhang & Sennrich 2019, arXiv:1910.07467).
    """
    states, down, down_bias, up, up_bias = (np.asarray(a, np.float64) for a in (hidden, down, down_bias, up, up_bias))
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.square(states).sum(axis=-1, keepdims=True)
        normed = np.where(squares <= _LARGEST_SQUARES, states / np.sqrt(squares / states.shape[-1] + epsilon), np.nan)
        x = normed @ down.T + down_bias
        return np.asarray(_sigmoid((x * _sigmoid(x)) @ up + up_bias.reshape(())))


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-x))
