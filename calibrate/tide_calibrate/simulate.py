"""The policies ``full`` and ``exit``, played through on a text of which it is known what every exit would have said.

exit    A token's output is final at the first confident exit. ``deferred``: its remaining layers are run when a later
        token goes deeper, together; those of the last tokens of a text never. ``propagate``: they are never run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tide_runtime.calibration import CostTable, ExitInfo
from tide_runtime.errors import ParamsError

from tide_calibrate.playback import Playback, PolicySimulation, advance, windows
from tide_calibrate.step_times import StepTimes
from tide_calibrate.traces import SplitTrace


def simulate_full(trace: SplitTrace, checkpoints: Sequence[int], costs: CostTable) -> PolicySimulation:
    """Policy ``full`` on the model cut at ``checkpoints``: the uncut model and a launch for every further graph."""
    times, layers = StepTimes(costs, 1), trace.num_layers
    ms = float(times.segments(len(checkpoints) + 1, layers)[1] + times.logits[1] + times.host)
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
    spans = windows(trace)
    longest = max(end - start for start, end in spans)
    run = Playback.prepare(trace, [exit for exit, _ in certified], [threshold for _, threshold in certified], longest)
    for start, end in spans:
        _deferred_window(run, start, end) if kv == "deferred" else _propagate_window(run, start, end)
    run.counts.turns = len(run.stops)
    early = run.stops < len(run.decisions)
    wrong = float(np.mean(early & ~run.agrees))
    acceptance = 1 - wrong / float(np.mean(early)) if early.any() else None
    return run.result("exit", costs, acceptance, wrong, kv_fill_ms)


def _deferred_window(run: Playback, start: int, end: int) -> None:
    deepest, counts = len(run.decisions), run.counts
    waiting = [0] * (deepest + 1)
    for stop in run.stops[start:end].tolist():
        advance(counts, waiting, stop)
        if stop == deepest:
            counts.heads[1] += 1
            waiting[deepest] = 0
    counts.ask(start, end)


def _propagate_window(run: Playback, start: int, end: int) -> None:
    deepest, counts, stops = len(run.decisions), run.counts, run.stops[start:end]
    for level in range(deepest + 1):
        needed = int((stops >= level).sum())
        counts.batches[level][1] += needed
        counts.fills[level] += len(stops) - needed
    counts.heads[1] += int((stops == deepest).sum())
    counts.ask(start, end)
