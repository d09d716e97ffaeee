"""A cost table with round figures, and traces whose every decision is written out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tide_calibrate.traces.trace import ExitTrace, SplitTrace
from tide_runtime.bundle.calibration import CostTable, StepCost

LAYERS = 10
LAUNCH, LAYER, EXTRA, HEAD, EXIT, HOST = 0.5, 1.0, 0.1, 2.0, 0.25, 0.125
LOGITS = HEAD - LAUNCH  # the head inside the last segment
SIZES = (1, 2, 4, 8, 16)


def table(layers: int = LAYERS, extra: float = EXTRA) -> CostTable:
    """A layer takes 1 ms and 0.1 ms for each token more; the head always 2 ms."""
    steps = [StepCost(1, size, LAUNCH, LAYER + extra * (size - 1), HEAD, EXIT, HOST) for size in SIZES]
    return CostTable("cpu", "made up", LAUNCH + layers * LAYER + LOGITS + HOST, steps)


def trace(
    exits: dict[int, tuple[Sequence[float], Sequence[bool]]], window: Sequence[int] | None = None, head: str = "identity"
) -> SplitTrace:
    """checkpoint → scores (of every router) and agreement of ``head`` there; one window unless ``window`` is given."""
    count = len(next(iter(exits.values()))[0])
    places = np.zeros(count, np.int32) if window is None else np.array(window, np.int32)
    nll = np.ones(count, np.float32)
    traced = {}
    for checkpoint, (scores, agrees) in exits.items():
        values = np.array(scores, np.float32)
        routers = {"max_probability": values, "mlp": values}
        traced[checkpoint, head] = ExitTrace(checkpoint, head, np.array(agrees, bool), nll, routers)
    return SplitTrace(places, places, nll, traced, LAYERS)
