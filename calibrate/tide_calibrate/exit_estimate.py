"""How fast policy ``exit`` would be with some exits, before thresholds are certified: to choose between exits, not to promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tide_runtime.calibration import CostTable, ExitInfo

from tide_calibrate.exit_policy import policy_counts
from tide_calibrate.simulate import simulate_exit
from tide_calibrate.threshold_family import fit_family
from tide_calibrate.traces import SplitTrace


def exit_speedup(trace: SplitTrace, exits: Sequence[ExitInfo], costs: CostTable, max_disagreement: float) -> float:
    """With the boldest thresholds that change at most ``max_disagreement`` of the tokens of ``trace``; 1 when none do."""
    family = fit_family(trace, [(info.checkpoint, info.head, info.router, info.mlp_threshold) for info in exits])
    counts = policy_counts(trace, family.exits, family.thresholds, np.zeros(len(trace.window), np.intp))
    allowed = np.flatnonzero(counts.rates()[0] <= max_disagreement)
    thresholds = family.thresholds[allowed[-1]] if len(allowed) else np.full(len(exits), np.inf)
    if not np.isfinite(thresholds).any():
        return 1.0
    bold = [replace(info, exit_threshold=min(float(t), 1.0)) for info, t in zip(exits, thresholds, strict=True)]
    return simulate_exit(trace, bold, costs).speedup
