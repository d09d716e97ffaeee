"""Where each token stops, given exits and thresholds, and how many layers that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tide_runtime.calibration import ExitInfo

from tide_calibrate.traces import ExitTrace, SplitTrace

Policy = Literal["exact", "exit"]


@dataclass(frozen=True)
class Stops:
    """What became of n tokens.

    Args:
        exit: [n] int, index of the exit that took the token; the number of exits when it went through all layers.
        layers: [n] int, layers run for it: to the checkpoint, the layers inside the exit heads that were asked (in vain
            or not), and the rest of the model when nothing stopped it.
    """

    exit: NDArray[np.int64]
    layers: NDArray[np.int64]


def threshold_of(info: ExitInfo, policy: Policy) -> float:
    """Least score at which ``policy`` stops; infinite when no threshold was certified."""
    if policy == "exact":
        return info.exact_threshold
    return float("inf") if info.exit_threshold is None else info.exit_threshold


def stops(trace: SplitTrace, exits: Sequence[ExitInfo], thresholds: Sequence[float]) -> Stops:
    """Send every token of ``trace`` down the exits, shallow first; it stops at the first whose threshold it reaches."""
    taken = np.full(trace.window.size, len(exits))
    layers = np.zeros(trace.window.size, np.int64)
    for i, (info, threshold) in enumerate(zip(exits, thresholds, strict=True)):
        exit_trace, here = trace.exits[info.checkpoint, info.head], taken == len(exits)
        asked = here & _asks_head(info, exit_trace)
        stopping = asked & (_score(info, exit_trace) >= threshold)
        head_runs = stopping if info.router == "mlp" else asked & np.isfinite(threshold)
        layers[head_runs] += layers_in_head(info.head)
        layers[stopping] += info.checkpoint
        taken[stopping] = i
    layers[taken == len(exits)] += trace.num_layers
    return Stops(taken, layers)


def layers_in_head(head: str) -> int:
    """Layers that an exit head runs itself: k for ``tail:k`` and ``block:k``, none for the others."""
    _, _, count = head.partition(":")
    return int(count or 0)


def _asks_head(info: ExitInfo, trace: ExitTrace) -> NDArray[np.bool_]:
    if info.mlp_threshold is None:
        return np.ones(trace.agrees.size, np.bool_)
    return trace.scores["mlp"] >= info.mlp_threshold


def _score(info: ExitInfo, trace: ExitTrace) -> NDArray[np.float32]:
    return trace.scores["max_probability" if info.router == "mlp+max_probability" else info.router]
