"""Norms without weight, in float64."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Norm = Literal["rms", "layer"]
_LARGEST_SQUARES = float(np.finfo(np.float32).max)


def norm(hidden: NDArray[np.float64], kind: Norm, epsilon: float) -> NDArray[np.float64]:
    """RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) or LayerNorm (Ba et al. 2016, arXiv:1607.06450) of rows [N, H].

    A row whose sum of squares overflows float32 becomes NaN, as in the kernels, and has no score.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        centred = hidden - (hidden.mean(axis=-1, keepdims=True) if kind == "layer" else 0.0)
        squares = np.square(centred).sum(axis=-1, keepdims=True)
        normed = centred / np.sqrt(squares / hidden.shape[-1] + epsilon)
    return np.where(squares <= _LARGEST_SQUARES, normed, np.nan)
