"""Reference of the low-rank exit head, csrc/exit_translate.cuh."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tide_plugins.reference.norm import Norm, norm


def exit_translate(
    hidden: ArrayLike, down: ArrayLike, up: ArrayLike, *, epsilon: float = 1e-6, kind: Norm = "rms"
) -> NDArray[np.float64]:
    """hidden + up · (down · norm(hidden)): [N, H] from down [K, H] and up [H, K] (tuned lens, arXiv:2303.08112, equation 8)."""
    states, down, up = (np.asarray(a, np.float64) for a in (hidden, down, up))
    with np.errstate(invalid="ignore", over="ignore"):
        return states + norm(states, kind, epsilon) @ down.T @ up.T
