"""Speeds of depth policies by the calibration's cost model, on texts that the model has written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from tide_calibrate.simulation.exact import Drafter, simulate_exact
from tide_calibrate.simulation.exit import simulate_exit, simulate_full
from tide_calibrate.traces.trace import OwnText, SplitTrace
from tide_runtime.bundle.calibration import CostTable

from benchmarks.arms.policy_cases import Case


def modelled_speedup(case: Case, trace: SplitTrace, costs: CostTable, draft_limit: int) -> float:
    """The speed of ``case`` over the uncut model on the texts of ``trace``, by ``costs``."""
    if case.policy == "full":
        return simulate_full(trace, costs).speedup
    if case.policy == "exit":
        return simulate_exit(trace, case.exits, costs).speedup
    return simulate_exact(trace, case.exits, costs, draft_limit, cast(Drafter, case.draft)).speedup


def trace_without_exits(texts: Sequence[Sequence[int]], prompt: int, num_layers: int) -> SplitTrace:
    """The trace of ``texts``, of which the model wrote all but the first ``prompt`` tokens, for policies that ask no exits."""
    new = [len(text) - prompt - 1 for text in texts]  # the prompt's pass gives the first new token
    window = np.repeat(np.arange(len(texts), dtype=np.int32), new)
    own = {i: OwnText(np.array(text, np.int64), prompt + 1) for i, text in enumerate(texts)}
    return SplitTrace(window, window, np.zeros(len(window), np.float32), {}, num_layers, own)
