"""The policies ``full`` and ``exit``, played through on a text of which it is known what every exit would have said.

exit    A token's output is final at the first confident exit. ``deferred``: its remaining layers are run when a later
        token goes deeper, together; those of the last tokens of a text never. ``propagate``: they are never run. Where asking
        has not paid of late it rests (tide_runtime.drafting.backoff), as the runtime's does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import CostTable, ExitInfo
from tide_runtime.drafting.backoff import Trial
from tide_runtime.errors import ParamsError

from tide_calibrate.costs.step_times import StepTimes
from tide_calibrate.simulation.backoff_costs import TrialCosts
from tide_calibrate.simulation.replay import Playback, PolicySimulation, advance, windows
from tide_calibrate.traces.trace import SplitTrace


def simulate_full(trace: SplitTrace, costs: CostTable) -> PolicySimulation:
    """Policy ``full``: one launch takes a token through all layers, wherever the model is cut."""
    times, layers = StepTimes(costs, 1), trace.num_layers
    ms = float(times.whole(layers)[1] + times.host)
    return PolicySimulation("full", len(trace.window), times.unsplit / ms, ms, layers, 1.0, None, 0.0, {layers: 1.0})


def simulate_exit(
    trace: SplitTrace, exits: Sequence[ExitInfo], costs: CostTable, kv: str = "deferred", kv_fill_ms: float = 0.0
) -> PolicySimulation:
    """Policy ``exit`` with the exits' ``exit_threshold``, greedy, one row; exits without a threshold are passed by.

    Args:
        kv: ``deferred`` or ``propagate``.
        kv_fill_ms: with ``propagate``, ms to project K and V of one skipped layer; a launch per skipped segment is added.
    """
    if kv not in ("deferred", "propagate"):
        raise ParamsError(f"kv is {kv!r}; set it to deferred or propagate")
    certified = [(exit, exit.exit_threshold) for exit in exits if exit.exit_threshold is not None]
    exits, thresholds = [exit for exit, _ in certified], [threshold for _, threshold in certified]
    spans = windows(trace)
    longest = max(end - start for start, end in spans)
    run = Playback.prepare(trace, exits, thresholds, longest)
    fill = kv_fill_ms if kv == "propagate" else None
    judged = TrialCosts.of(exits, trace.num_layers, StepTimes(costs, longest), fill)
    asked = np.concatenate([_Window(run, judged, kv == "propagate", start, end).play() for start, end in spans])
    early = asked & (run.stops < len(run.decisions))
    wrong = float(np.mean(early & ~run.agrees))
    acceptance = 1 - wrong / float(np.mean(early)) if early.any() else None
    return run.result("exit", costs, acceptance, wrong, kv_fill_ms)


class _Window:
    """The window [start, end) of a trace, token by token."""

    def __init__(self, run: Playback, judged: TrialCosts, propagate: bool, start: int, end: int) -> None:
        self.counts, self.deepest, self.start = run.counts, len(run.decisions), start
        self.stops = run.stops[start:end].tolist()
        self.judged, self.propagate, self.trial = judged, propagate, Trial()
        self.waiting, self.streak = [0] * (self.deepest + 1), 0  # tokens at the end of each level; early stops since a deep one

    def play(self) -> NDArray[np.bool_]:
        """Generate the window; returns [tokens], which of them asked."""
        asked = np.zeros(len(self.stops), np.bool_)
        for i, stop in enumerate(self.stops):
            waited = 1 + sum(self.waiting[: self.deepest])
            asked[i] = not self.trial.resting
            if not asked[i]:
                self._unasked(waited)
                continue
            self.counts.ask(self.start + i, self.start + i + 1)
            self._run(stop)
            self.trial.saw(1, float(self.judged.deep[waited] if stop == self.deepest else self.judged.early[stop]))
        return asked

    def _unasked(self, waited: int) -> None:
        if waited == 1:
            self.counts.whole[1] += 1
            self.streak = 0
        else:
            self._run(self.deepest)
        self.trial.rest(1)

    def _run(self, stop: int) -> None:
        """One new token to where it stops, and what waits on its way."""
        if self.propagate:
            self._run_alone(stop)
        else:
            advance(self.counts, self.waiting, stop, self.streak)
        self.streak += 1
        if stop == self.deepest:
            self.counts.heads[1] += 1
            self.waiting, self.streak = [0] * (self.deepest + 1), 0

    def _run_alone(self, stop: int) -> None:
        self.counts.enter(self.streak)
        for level in range(1, self.deepest + 1):
            self.counts.batches[level][1] += level <= stop
            self.counts.fills[level] += level > stop
        self.waiting[stop] += 1
