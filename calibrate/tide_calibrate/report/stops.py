"""The exit at which each token stops, given exits and thresholds, and the number of layers it runs."""

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
    """Stops of n tokens.

    Args:
        exit_index: [n] int, index of the exit where the token stops; the number of exits when it runs all layers.
        layers: [n] int, layers run until the token is final: the prefix, or all of the model's, and those inside every evaluated
            exit head, including heads after which the token did not stop.
    """

    exit_index: NDArray[np.int64]
    layers: NDArray[np.int64]


def thresholds_of(exits: Sequence[ExitInfo], policy: Policy) -> list[float]:
    """The exits' thresholds for ``policy``; infinite where none was certified."""
    if policy == "exact":
        return [info.exact_threshold for info in exits]
    return [float("inf") if info.exit_threshold is None else info.exit_threshold for info in exits]


def stops(trace: SplitTrace, exits: Sequence[ExitInfo], thresholds: Sequence[float] | NDArray[np.float64]) -> Stops:
    """Find the first exit, shallow first, whose router is confident, for every token of ``trace``."""
    count = trace.window.size
    exit_index, layers = np.full(count, len(exits)), np.zeros(count, np.int64)
    for i, (info, threshold) in enumerate(zip(exits, thresholds, strict=True)):
        if not np.isfinite(threshold):
            continue  # the exit is never evaluated
        decisions, running = decide(trace, info, threshold), exit_index == len(exits)
        layers[running & decisions.asks_head] += info.tail_layers
        layers[running & decisions.confident] += info.checkpoint
        exit_index[running & decisions.confident] = i
    layers[exit_index == len(exits)] += trace.num_layers
    return Stops(exit_index, layers)
