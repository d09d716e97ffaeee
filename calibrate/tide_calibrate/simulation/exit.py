"""The policies ``full`` and ``exit``, played through on a text of which it is known what every exit would have said.

exit    A token's output is final at the first confident exit. ``deferred``: its remaining layers are run when a later
        token goes deeper, together; those of the last tokens of a text never. ``propagate``: they are never run. Where asking
        has not paid of late it rests (`Backoff`), as the runtime's does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import CostTable, ExitInfo, cuts
from tide_runtime.bundle.exits import Exit
from tide_runtime.costs.cost_model import CostModel, StepCurve
from tide_runtime.depth.speculation.record import exit_backoff
from tide_runtime.depth_tuning import DepthTuning
from tide_runtime.errors import ParamsError

from tide_calibrate.simulation.replay import Playback, PolicySimulation, advance, windows
from tide_calibrate.traces.trace import SplitTrace

TUNING = DepthTuning()


def simulate_full(trace: SplitTrace, costs: CostTable) -> PolicySimulation:
    """Policy ``full``: one launch takes a token through all layers, wherever the model is cut."""
    times, layers = StepCurve.of(costs, 1), trace.num_layers
    ms = float(times.whole(layers)[1] + float(times.host_ms[1]))
    return PolicySimulation("full", len(trace.window), costs.unsplit_ms / ms, ms, layers, 1.0, None, 0.0, {layers: 1.0})


def simulate_exit(
    trace: SplitTrace,
    exits: Sequence[ExitInfo],
    costs: CostTable,
    kv: str = "deferred",
    fill_share: float = 0.0,
    tuning: DepthTuning = TUNING,
) -> PolicySimulation:
    """Policy ``exit`` with the exits' ``exit_threshold``, greedy, one row; exits without a threshold are passed by.

    Args:
        kv: ``deferred`` or ``propagate``.
        fill_share: with ``propagate``, cost of projecting K and V of a skipped layer over that of the layer.
    """
    if kv not in ("deferred", "propagate"):
        raise ParamsError(f"kv is {kv!r}; set it to deferred or propagate")
    certified = [(exit, exit.exit_threshold) for exit in exits if exit.exit_threshold is not None]
    exits, thresholds = [exit for exit, _ in certified], [threshold for _, threshold in certified]
    spans = windows(trace)
    longest = max(end - start for start, end in spans)
    run = Playback.prepare(trace, exits, thresholds, longest)
    price = _TokenPrice(exits, trace.num_layers, costs, kv == "propagate", fill_share)
    asked = np.concatenate([_Window(run, price, kv == "propagate", tuning, start, end).play() for start, end in spans])
    early = asked & (run.stops < len(run.decisions))
    wrong = float(np.mean(early & ~run.agrees))
    acceptance = 1 - wrong / float(np.mean(early)) if early.any() else None
    return run.result("exit", costs, acceptance, wrong, fill_share)


class _TokenPrice:
    """What one token costs under policy ``exit``, in full-depth decode steps: the runtime's own price, looked up."""

    def __init__(self, exits: Sequence[ExitInfo], num_layers: int, costs: CostTable, propagate: bool, fill_share: float) -> None:
        edges = [0, *cuts(exits, num_layers), num_layers]
        self._exits = [Exit(i, edges.index(i.checkpoint), f"exit_{i.checkpoint}" if i.graph_outputs() else None) for i in exits]
        self._model, self._propagate = CostModel(costs, edges, fill_share=fill_share), propagate
        self._known: dict[tuple[int, int], float] = {}

    def __call__(self, stop: int, waited: int) -> float:
        """A token that stops at exit number ``stop``, or, where that is the number of exits, one that takes ``waited`` tokens,
        itself included, through the remaining layers."""
        count = len(self._exits)
        key = (stop, waited if stop == count else 0)
        if key not in self._known:
            evaluated = [int(number <= stop) for number in range(count)]
            deep = min(key[1], 1) if self._propagate else key[1]
            self._known[key] = self._model.early_exit_token(self._exits, evaluated, key[1], deep) if count else 1.0
        return self._known[key]


class _Window:
    """The window [start, end) of a trace, token by token."""

    def __init__(self, run: Playback, price: _TokenPrice, propagate: bool, tuning: DepthTuning, start: int, end: int) -> None:
        self.counts, self.deepest, self.start = run.counts, len(run.decisions), start
        self.stops = run.stops[start:end].tolist()
        self.price, self.propagate = price, propagate
        self.backoff = exit_backoff(tuning)
        self.waiting, self.streak = [0] * (self.deepest + 1), 0  # tokens at the end of each level; early stops since a deep one

    def play(self) -> NDArray[np.bool_]:
        """Generate the window; returns [tokens], which of them asked."""
        asked = np.zeros(len(self.stops), np.bool_)
        for i, stop in enumerate(self.stops):
            waited = 1 + sum(self.waiting[: self.deepest])
            asked[i] = self.backoff.active
            if not asked[i]:
                self._unasked(waited)
                continue
            self.counts.ask(self.start + i, self.start + i + 1)
            self._run(stop)
            self.backoff.observe(1, self.price(stop, waited))
        return asked

    def _unasked(self, waited: int) -> None:
        if waited == 1:
            self.counts.whole[1] += 1
            self.streak = 0
        else:
            self._run(self.deepest)
        self.backoff.pass_tokens(1)

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
