"""The policies ``full`` and ``exit``, played through on a text of which it is known what every exit would have said.

exit    A token's output is final at the first confident exit. Its remaining layers are run when a later token goes deeper,
        together; those of the last tokens of a text never. Where evaluating exits has not paid of late, they are left out for
        a while (`Backoff`), as the runtime does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import CostTable, ExitInfo
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.speculation.record import exit_backoff
from tide_runtime.depth_tuning import DepthTuning

from tide_calibrate.simulation.replay import Playback, PolicySimulation, windows
from tide_calibrate.traces.trace import SplitTrace

TUNING = DepthTuning()


def simulate_full(trace: SplitTrace, costs: CostTable) -> PolicySimulation:
    """Policy ``full``: one launch takes a token through all layers, wherever the model is cut."""
    layers = trace.num_layers
    ms = CostModel(costs, [0, layers]).full(1, 1, 1)
    return PolicySimulation("full", len(trace.window), costs.unsplit_ms / ms, ms, layers, 1.0, None, 0.0, {layers: 1.0})


def simulate_exit(
    trace: SplitTrace,
    exits: Sequence[ExitInfo],
    costs: CostTable,
    tuning: DepthTuning = TUNING,
) -> PolicySimulation:
    """Policy ``exit`` with the exits' ``exit_threshold``, greedy, one row; exits without a threshold are passed by."""
    certified = [(exit, exit.exit_threshold) for exit in exits if exit.exit_threshold is not None]
    exits, thresholds = [exit for exit, _ in certified], [threshold for _, threshold in certified]
    spans = windows(trace)
    longest = max(end - start for start, end in spans)
    run = Playback.prepare(trace, exits, thresholds, costs, longest)
    token_cost = cache(partial(_token_cost, run))
    evaluated = np.concatenate([_Window(run, token_cost, tuning, start, end).play() for start, end in spans])
    early = evaluated & (run.stops < len(run.decisions))
    wrong = float(np.mean(early & ~run.agrees))
    acceptance = 1 - wrong / float(np.mean(early)) if early.any() else None
    return run.result("exit", costs, acceptance, wrong)


def _token_cost(run: Playback, stop: int, waited: int) -> float:
    """A token's cost under policy ``exit``, in full-depth decode steps: the runtime's own price.

    ``stop``: index of the exit where it stops (``waited`` is 0), or the number of exits where it takes ``waited`` tokens, itself
    included, through the remaining layers.
    """
    evaluated = [int(number <= stop) for number in range(len(run.exits))]
    return run.model.early_exit_token(run.exits, evaluated, waited) if run.exits else 1.0


class _Window:
    """The window [start, end) of a trace, token by token."""

    def __init__(self, run: Playback, token_cost: Callable[[int, int], float], tuning: DepthTuning, start: int, end: int) -> None:
        self.counts, self.deepest, self.start = run.counts, len(run.decisions), start
        self.stops = run.stops[start:end].tolist()
        self.token_cost, self.backoff = token_cost, exit_backoff(tuning)
        self.waiting = [0] * (self.deepest + 1)  # tokens at the end of each level

    def play(self) -> NDArray[np.bool_]:
        """Generate the window; returns [tokens], for which of them exits were evaluated."""
        evaluated = np.zeros(len(self.stops), np.bool_)
        for i, stop in enumerate(self.stops):
            waited = 1 + sum(self.waiting[: self.deepest])
            evaluated[i] = self.backoff.active
            if evaluated[i]:
                self.counts.evaluate(self.start + i, self.start + i + 1)
                self._run(stop)
                self.backoff.observe(1, self.token_cost(stop, waited if stop == self.deepest else 0))
                continue
            if waited == 1:
                self.counts.whole[1] += 1
            else:
                self._run(self.deepest)
            self.backoff.pass_tokens(1)
        return evaluated

    def _run(self, stop: int) -> None:
        """One new token to where it stops, and what waits on its way."""
        self.counts.advance(self.waiting, stop)
        if stop == self.deepest:
            self.counts.heads[1] += 1
            self.waiting = [0] * (self.deepest + 1)
