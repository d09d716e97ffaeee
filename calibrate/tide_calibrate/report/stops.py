"""Where each token stops, given exits and thresholds, and how many layers that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import ExitInfo

from tide_calibrate.simulation.exit_decisions import decide
from tide_calibrate.traces.trace import SplitTrace

Policy = Literal["exact", "exit"]


@dataclass(frozen=True)
class Stops:
    """What became of n tokens.

    Args:
        exit: [n] int, index of the exit that took the token; the number of exits when it went through all layers.
        layers: [n] int, layers run before its output was known: to the checkpoint, or all of the model's, and those inside
            the exit heads that were asked, in vain or not.
    """

    exit: NDArray[np.int64]
    layers: NDArray[np.int64]


def thresholds_of(exits: Sequence[ExitInfo], policy: Policy) -> list[float]:
    """Least score of each exit at which ``policy`` stops; infinite where no threshold was certified."""
    if policy == "exact":
        return [info.exact_threshold for info in exits]
    return [float("inf") if info.exit_threshold is None else info.exit_threshold for info in exits]


def stops(trace: SplitTrace, exits: Sequence[ExitInfo], thresholds: Sequence[float] | NDArray[np.float64]) -> Stops:
    """Send every token of ``trace`` down the exits, shallow first; it stops at the first whose router is confident."""
    count = trace.window.size
    taken, layers = np.full(count, len(exits)), np.zeros(count, np.int64)
    for i, (info, threshold) in enumerate(zip(exits, thresholds, strict=True)):
        if not np.isfinite(threshold):
            continue  # never asked
        decisions, here = decide(trace, info, threshold), taken == len(exits)
        layers[here & decisions.asks_head] += info.tail_layers
        layers[here & decisions.confident] += info.checkpoint
        taken[here & decisions.confident] = i
    layers[taken == len(exits)] += trace.num_layers
    return Stops(taken, layers)
