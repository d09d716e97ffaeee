"""Reference of the fused router, csrc/exit_router.cuh."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tide_plugins.reference.norm import Norm, norm

ALL_EXIT, SOME_EXIT, NONE_EXITS = 0, 1, 2


@dataclass(frozen=True)
class Routing:
    """``score`` [N] float64, ``exits`` [N] bool, ``exit_rows`` and ``continue_rows`` ascending int32, ``verdict`` 0, 1 or 2."""

    score: NDArray[np.float64]
    exits: NDArray[np.bool_]
    exit_rows: NDArray[np.int32]
    continue_rows: NDArray[np.int32]
    verdict: int


def exit_router(
    hidden: ArrayLike,
    down: ArrayLike,
    down_bias: ArrayLike,
    up: ArrayLike,
    up_bias: ArrayLike,
    *,
    threshold: float,
    epsilon: float = 1e-6,
    kind: Norm = "rms",
) -> Routing:
    """Compare sigmoid(up · silu(down · norm(hidden) + down_bias) + up_bias) with a threshold.

    Args:
        hidden: [N, H].
        down, down_bias, up, up_bias: [R, H], [R], [R], [1].
        threshold: a row exits when its score is at least this; never with a NaN score.
        epsilon: the norm's epsilon.
        kind: the norm, which has no weight.
    """
    states, down, down_bias, up, up_bias = (np.asarray(a, np.float64) for a in (hidden, down, down_bias, up, up_bias))
    with np.errstate(invalid="ignore", over="ignore"):
        x = norm(states, kind, epsilon) @ down.T + down_bias
        score = _sigmoid((x * _sigmoid(x)) @ up + up_bias.reshape(()))
        exits = score >= threshold
    verdict = ALL_EXIT if exits.all() else SOME_EXIT if exits.any() else NONE_EXITS
    return Routing(score, exits, _rows(exits), _rows(~exits), verdict)


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-x))


def _rows(flags: NDArray[np.bool_]) -> NDArray[np.int32]:
    return np.flatnonzero(flags).astype(np.int32)
