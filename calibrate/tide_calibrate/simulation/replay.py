"""A text played through by a depth policy: where each of its tokens stops, and what was launched so far.

A launch is what costs, so launches are counted by their number of tokens, and `launches.price` says what they take.
Each window of the trace is one generation of one row, and the text's tokens stand in for the tokens chosen: exact for the
model's own greedy output, an approximation after a wrong draft, whose successors are taken to look like the right text's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import CostTable, ExitInfo
from tide_runtime.costs.cost_model import StepCurve
from tide_runtime.errors import CalibrationError

from tide_calibrate.simulation.exit_decisions import ExitDecisions, decide, first_stops
from tide_calibrate.simulation.launches import LaunchCounts, price
from tide_calibrate.traces.trace import SplitTrace


@dataclass(frozen=True)
class PolicySimulation:
    """What a policy did on a text, one row.

    Args:
        policy: ``full``, ``exact`` or ``exit``.
        tokens: tokens generated.
        speedup: tokens/s over the uncut model's.
        ms_per_token: modelled.
        layers_per_token: decoder layers launched per token generated, a batch of tokens counted once.
        tokens_per_cycle: tokens per run of the last layers.
        acceptance: share of drafts, or of exits, whose token is the full model's; None when there were none.
        disagreement: share of the output that differs from the full model's; 0 for ``exact``.
        stops: layers run → share of the tokens processed that stopped there (L: went all the way at once).
    """

    policy: str
    tokens: int
    speedup: float
    ms_per_token: float
    layers_per_token: float
    tokens_per_cycle: float
    acceptance: float | None
    disagreement: float
    stops: dict[int, float]


def windows(trace: SplitTrace) -> list[tuple[int, int]]:
    """[first, end) of each window's tokens. Raises CalibrationError when there are no tokens."""
    if not len(trace.window):
        raise CalibrationError("the trace has no tokens; capture a longer text")
    edges = np.flatnonzero(np.diff(trace.window)) + 1
    return list(itertools.pairwise([0, *edges.tolist(), len(trace.window)]))


@dataclass(frozen=True)
class Playback:
    """A text, where its tokens stop, and what was launched so far. ``stops``, ``agrees``: see `first_stops`."""

    num_layers: int
    most: int  # tokens in a batch
    decisions: list[ExitDecisions]
    stops: NDArray[np.int64]
    agrees: NDArray[np.bool_]
    counts: LaunchCounts

    @staticmethod
    def prepare(trace: SplitTrace, exits: Sequence[ExitInfo], thresholds: Sequence[float], most: int) -> Playback:
        check_order(exits, trace.num_layers)
        decisions = [decide(trace, exit, threshold) for exit, threshold in zip(exits, thresholds, strict=True)]
        stops, agrees = first_stops(decisions, len(trace.window))
        return Playback(trace.num_layers, most, decisions, stops, agrees, LaunchCounts.zeros(len(stops), len(exits), most))

    def result(
        self, policy: str, costs: CostTable, acceptance: float | None, disagreement: float, fill_share: float = 0.0
    ) -> PolicySimulation:
        counts, tokens, times = self.counts, len(self.stops), StepCurve.of(costs, self.most)
        total = price(counts, self.decisions, self.stops, self.num_layers, times, fill_share)
        ms, cycles = total.ms / tokens, sum(counts.heads) + sum(counts.whole)
        return PolicySimulation(
            policy=policy,
            tokens=tokens,
            speedup=costs.unsplit_ms / ms,
            ms_per_token=ms,
            layers_per_token=total.layers / tokens,
            tokens_per_cycle=tokens / max(1, cycles),
            acceptance=acceptance,
            disagreement=disagreement,
            stops=self._stop_shares(),
        )

    def _stop_shares(self) -> dict[int, float]:
        depths = [*(decision.info.checkpoint for decision in self.decisions), self.num_layers]
        asked, processed = self.counts.asked(), self.counts.processed()
        shares = np.bincount(self.stops, weights=asked, minlength=len(depths))
        shares[-1] += processed - asked.sum()
        return {depth: float(share) / processed for depth, share in zip(depths, shares, strict=True)}


def check_order(exits: Sequence[ExitInfo], num_layers: int) -> None:
    """Raise CalibrationError unless checkpoints ascend and every tail begins below its checkpoint's rest."""
    places = [exit.checkpoint for exit in exits]
    late = [exit.checkpoint for exit in exits if not 0 < exit.checkpoint < num_layers - exit.tail_layers]
    if places != sorted(set(places)) or late:
        raise CalibrationError(
            f"exits at {places} of {num_layers} layers; list them shallow first, one per checkpoint, "
            "each before the last layer and before its own tail"
        )


def advance(counts: LaunchCounts, waiting: list[int], stop: int, streak: int) -> None:
    """Run one new token through the levels up to ``stop``, and with it everything that waits on its way.

    ``streak``: turns that stopped early since the last deep one.
    """
    counts.enter(streak)
    waiting[0] += 1
    for level in range(stop):
        carried = waiting[level]
        counts.batches[level + 1][carried] += 1
        waiting[level + 1] += carried
        waiting[level] = 0
