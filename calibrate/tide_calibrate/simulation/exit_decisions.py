"""What an exit's router would say about every token of a text, and what asking it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.costs.cost_model import StepCurve

from tide_calibrate.certificate.risk import ExitRule
from tide_calibrate.traces.trace import SplitTrace


@dataclass(frozen=True)
class ExitDecisions:
    """One exit on n tokens.

    Args:
        confident: [n] bool, the router lets the token stop here. A NaN score never does.
        asks_head: [n] bool, the exit head was run to find that out, or for the token that stops.
        agrees: [n] bool, the exit head's likeliest token is the full model's.
    """

    info: ExitInfo
    confident: NDArray[np.bool_]
    asks_head: NDArray[np.bool_]
    agrees: NDArray[np.bool_]


def decide(trace: SplitTrace, info: ExitInfo, threshold: float) -> ExitDecisions:
    """The decisions of exit ``info`` on ``trace`` with ``threshold`` in place of its own.

    Raises CalibrationError when the trace has no such exit or its router was not recorded.
    """
    rule = ExitRule(info.checkpoint, info.head, info.router, info.mlp_threshold)
    confident, traced = rule.scores(trace) >= threshold, rule.trace(trace)
    if info.router == "mlp":  # the head is only needed for the token that stops
        asked = confident
    elif info.router == "mlp+max_probability":
        asked = np.isfinite(traced.scores["mlp"]) & (traced.scores["mlp"] >= (info.mlp_threshold or 0.0))
    else:
        asked = np.ones(len(confident), bool)
    return ExitDecisions(info, confident, asked, traced.agrees)


def router_ms(info: ExitInfo, times: StepCurve) -> float:
    """ms of the exit's own graph (router and translator), run for every token that reaches it; 0 when it has none."""
    return float(times.exit_ms[1]) if info.graph_outputs() else 0.0


def head_ms(info: ExitInfo, times: StepCurve) -> float:
    """ms of finding the exit's token, one token: the LM head, with a tail as part of the last segment."""
    if info.tail_layers:
        return float(times.segments(1, info.tail_layers)[1] + times.logits_ms[1])
    return float(times.head_ms[1])


def first_stops(decisions: Sequence[ExitDecisions], tokens: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where each of ``tokens`` tokens stops first.

    Returns:
        [n] int64, the index of the first confident exit, len(decisions) for a token that none lets go; and
        [n] bool, that exit's token is the full model's.
    """
    stops, agrees = np.full(tokens, len(decisions)), np.ones(tokens, bool)
    for index, exit in reversed(list(enumerate(decisions))):
        stops[exit.confident] = index
        agrees[exit.confident] = exit.agrees[exit.confident]
    return stops, agrees
