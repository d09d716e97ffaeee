"""A cost table with round figures, and traces from explicit scores and agreements."""

from collections.abc import Sequence

import numpy as np
from tide_calibrate.traces.trace import ExitTrace, SplitTrace
from tide_runtime.bundle.calibration import CostTable, StepCost

LAYERS = 10
LAUNCH, LAYER, EXTRA, HEAD, EXIT, HOST = 0.5, 1.0, 0.1, 2.0, 0.25, 0.125
LOGITS = HEAD - LAUNCH  # the head inside the last segment
SIZES = (1, 2, 4, 8, 16)


def table(layers: int = LAYERS, extra: float = EXTRA) -> CostTable:
    """A table in which a layer takes 1 ms plus 0.1 ms per further token, and the head always 2 ms."""
    steps = [StepCost(1, size, LAUNCH, LAYER + extra * (size - 1), HEAD, EXIT, HOST) for size in SIZES]
    return CostTable("cpu", "synthetic", LAUNCH + layers * LAYER + LOGITS + HOST, steps)


def trace(
    exits: dict[int, tuple[Sequence[float], Sequence[bool]]], window: Sequence[int] | None = None, head: str = "identity"
) -> SplitTrace:
    """A trace with the same scores for every router.

    Args:
        exits: checkpoint → scores and agreement of ``head``.
        window: window of each token; one window for all when None.
    """
    count = len(next(iter(exits.values()))[0])
    windows = np.zeros(count, np.int32) if window is None else np.array(window, np.int32)
    nll = np.ones(count, np.float32)
    traced = {}
    for checkpoint, (scores, agrees) in exits.items():
        values = np.array(scores, np.float32)
        routers = {"max_probability": values, "mlp": values}
        traced[checkpoint, head] = ExitTrace(checkpoint, head, np.array(agrees, bool), nll, routers)
    return SplitTrace(windows, windows, nll, traced, LAYERS)
