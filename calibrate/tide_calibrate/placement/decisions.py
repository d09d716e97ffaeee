"""What an exit decides about each token of a trace, and where tokens stop under the thresholds of policy ``exit``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.errors import CalibrationError

from tide_calibrate.certificate.risk import ExitRule
from tide_calibrate.traces.trace import SplitTrace


@dataclass(frozen=True)
class ExitDecisions:
    """One exit on n tokens.

    Args:
        confident: [n] bool, the router lets the token stop here. A NaN score never does.
        runs_head: [n] bool, the exit head was run to find that out, or for the token that stops.
        agrees: [n] bool, the exit head's likeliest token is the full model's.
    """

    confident: NDArray[np.bool_]
    runs_head: NDArray[np.bool_]
    agrees: NDArray[np.bool_]


def decide(trace: SplitTrace, info: ExitInfo, threshold: float) -> ExitDecisions:
    """The decisions of exit ``info`` on ``trace`` with ``threshold`` in place of its own.

    Raises CalibrationError when the trace has no tokens, no such exit, or its router was not recorded.
    """
    if not len(trace.window):
        raise CalibrationError("the trace has no tokens; capture a longer text")
    rule = ExitRule.from_info(info)
    traced = rule.trace(trace)
    confident = rule.scores(trace) >= threshold
    if info.decides_before_head:  # the head is only needed for the token that stops
        runs_head = confident
    elif info.router == "mlp+max_probability":
        runs_head = np.isfinite(traced.scores["mlp"]) & (traced.scores["mlp"] >= (info.mlp_threshold or 0.0))
    else:
        runs_head = np.ones(len(confident), bool)
    return ExitDecisions(confident, runs_head, traced.agrees)


def exit_depths(trace: SplitTrace, exits: Sequence[ExitInfo]) -> dict[int, float]:
    """Layers run → share of the tokens of ``trace`` whose output is final there under policy ``exit``; the last key is L.

    ``exits``: shallow first; those without an ``exit_threshold`` are passed by.
    """
    running = np.ones(len(trace.window), bool)
    depths = dict[int, float]()
    for info in exits:
        if info.exit_threshold is not None:
            stops = running & decide(trace, info, info.exit_threshold).confident
            running &= ~stops
            depths[info.checkpoint] = float(stops.mean())
    return depths | {trace.num_layers: float(running.mean())}
