"""What policy ``exit`` takes tokens of a row to cost while it runs, in plain decode steps: its trial of asking judges by that.

The figures are those of tide_runtime.costs.cost_model for one row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import ExitInfo, cuts

from tide_calibrate.costs.step_times import StepTimes
from tide_calibrate.simulation.exit_decisions import head_ms, router_ms


@dataclass(frozen=True)
class TrialCosts:
    """``early``: [K], a token that stops at the exit. ``deep``: [S], one that none lets go, when S tokens wait, it among them."""

    early: NDArray[np.float64]
    deep: NDArray[np.float64]

    @staticmethod
    def of(exits: Sequence[ExitInfo], num_layers: int, times: StepTimes, kv_fill_ms: float | None) -> TrialCosts:
        """For ``exits``, shallow first. ``kv_fill_ms``: of one layer and token, where K and V of skipped layers are projected;
        None where the layers are run."""
        places, edges = cuts(exits, num_layers), [0, *(exit.checkpoint for exit in exits)]
        shallowest = exits[0].checkpoint + exits[0].tail_layers if exits else 0
        warm = float(times.warm_shares(shallowest, num_layers).mean())

        def segments(first: int, end: int) -> NDArray[np.float64]:
            return times.segments(1 + sum(first < place < end for place in places), end - first)

        runs = [float(segments(*pair)[1]) for pair in itertools.pairwise(edges)]
        runs[:1] = [run * warm for run in runs[:1]]
        asks = [run + router_ms(exit, times) + head_ms(exit, times) + times.asking for exit, run in zip(exits, runs, strict=True)]
        rest = segments(edges[-1], num_layers) + times.logits[1] + times.host
        if kv_fill_ms is not None:
            skipped = np.maximum(np.arange(len(rest)) - 1, 0) * (num_layers - edges[min(1, len(exits))])
            rest = rest[1] + skipped * kv_fill_ms + times.launch[1] * (skipped > 0)
        early = np.cumsum(asks)
        plain = float(times.whole(num_layers)[1] + times.host)
        return TrialCosts(early / plain, ((early[-1] if exits else 0.0) + rest) / plain)
