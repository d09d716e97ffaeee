"""Depth policies played through on a text of which it is known, token by token, what every exit would have said.

A launch is what costs, so the simulation counts launches by their number of tokens, and `launches.price` says what they take.
Each window of the trace is one generation of one row, and the text's tokens stand in for the tokens chosen: exact for the
model's own greedy output, an approximation after a wrong draft, whose successors are taken to look like the right text's.

    exact   Draft from the shallow segments while the router is confident (at most ``draft_limit`` drafts), then run the rest
            for all m waiting tokens at once. Gained: the drafts up to the first wrong one, and one token more. Speculative
            decoding (Leviathan et al. 2023) with the model's own first layers as drafter (LayerSkip, Elhoushi et al. 2024).
    exit    A token's output is final at the first confident exit. ``deferred``: its remaining layers are run when a later
            token goes deeper, together; those of the last tokens of a text never. ``propagate``: they are never run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tide_runtime.calibration import CostTable, ExitInfo
from tide_runtime.errors import CalibrationError, ParamsError

from tide_calibrate.exit_decisions import ExitDecisions, decide, first_stops
from tide_calibrate.launches import LaunchCounts, price
from tide_calibrate.step_times import StepTimes
from tide_calibrate.traces import SplitTrace


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


def simulate_full(trace: SplitTrace, checkpoints: Sequence[int], costs: CostTable) -> PolicySimulation:
    """Policy ``full`` on the model cut at ``checkpoints``: the uncut model and a launch for every further graph."""
    times, layers = StepTimes(costs, 1), trace.num_layers
    ms = float(times.segments(len(checkpoints) + 1, layers)[1] + times.head[1] + times.host)
    return PolicySimulation("full", len(trace.window), times.unsplit / ms, ms, layers, 1.0, None, 0.0, {layers: 1.0})


def simulate_exact(trace: SplitTrace, exits: Sequence[ExitInfo], costs: CostTable, draft_limit: int) -> PolicySimulation:
    """Policy ``exact`` with the exits' ``exact_threshold``, greedy, one row.

    Raises ParamsError for a draft limit under 0, CalibrationError when trace and exits do not fit together.
    """
    if draft_limit < 0:
        raise ParamsError(f"draft_limit is {draft_limit}; set it to an integer >= 0")
    run = _Playback.prepare(trace, exits, [exit.exact_threshold for exit in exits], most=draft_limit + 1)
    drafts = accepted = 0
    for start, end in windows(trace):
        made, right = _exact_window(run, start, end, draft_limit)
        drafts, accepted = drafts + made, accepted + right
    run.counts.turns = int(run.counts.asked().sum()) + sum(run.counts.heads)  # a draft or a refusal each, and verification
    return run.result("exact", costs, acceptance=accepted / drafts if drafts else None, disagreement=0.0)


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
    run = _Playback.prepare(trace, [exit for exit, _ in certified], [threshold for _, threshold in certified], longest)
    for start, end in spans:
        _deferred_window(run, start, end) if kv == "deferred" else _propagate_window(run, start, end)
    run.counts.turns = len(run.stops)
    early = run.stops < len(run.decisions)
    wrong = float(np.mean(early & ~run.agrees))
    acceptance = 1 - wrong / float(np.mean(early)) if early.any() else None
    return run.result("exit", costs, acceptance, wrong, kv_fill_ms)


def windows(trace: SplitTrace) -> list[tuple[int, int]]:
    """[first, end) of each window's tokens. Raises CalibrationError when there are no tokens."""
    if not len(trace.window):
        raise CalibrationError("the trace has no tokens; capture a longer text")
    edges = np.flatnonzero(np.diff(trace.window)) + 1
    return list(itertools.pairwise([0, *edges.tolist(), len(trace.window)]))


@dataclass(frozen=True)
class _Playback:
    """A text, where its tokens stop, and what was launched so far. ``stops``, ``agrees``: see `first_stops`."""

    num_layers: int
    most: int  # tokens in a batch
    decisions: list[ExitDecisions]
    stops: NDArray[np.int64]
    agrees: NDArray[np.bool_]
    counts: LaunchCounts

    @staticmethod
    def prepare(trace: SplitTrace, exits: Sequence[ExitInfo], thresholds: Sequence[float], most: int) -> _Playback:
        check_order(exits, trace.num_layers)
        decisions = [decide(trace, exit, threshold) for exit, threshold in zip(exits, thresholds, strict=True)]
        stops, agrees = first_stops(decisions, len(trace.window))
        return _Playback(trace.num_layers, most, decisions, stops, agrees, LaunchCounts.zeros(len(stops), len(exits), most))

    def result(
        self, policy: str, costs: CostTable, acceptance: float | None, disagreement: float, kv_fill_ms: float = 0.0
    ) -> PolicySimulation:
        counts, tokens, times = self.counts, len(self.stops), StepTimes(costs, self.most)
        total = price(counts, self.decisions, self.stops, self.num_layers, times, kv_fill_ms)
        ms, cycles = total.ms / tokens, sum(counts.heads)
        return PolicySimulation(
            policy=policy,
            tokens=tokens,
            speedup=times.unsplit / ms,
            ms_per_token=ms,
            layers_per_token=total.layers / tokens,
            tokens_per_cycle=tokens / max(1, cycles),
            acceptance=acceptance,
            disagreement=disagreement,
            stops=self._stop_shares(),
        )

    def _stop_shares(self) -> dict[int, float]:
        depths = [*(decision.info.checkpoint for decision in self.decisions), self.num_layers]
        asked, processed = self.counts.asked(), sum(self.counts.batches[0])
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


def _exact_window(run: _Playback, start: int, end: int, draft_limit: int) -> tuple[int, int]:
    """Generate one window; returns drafts made and drafts accepted."""
    deepest, size, counts = len(run.decisions), end - start, run.counts
    stops = run.stops[start:end].tolist()
    next_deep, next_wrong = _next(run.stops[start:end] == deepest), _next(~run.agrees[start:end])
    position = drafts = accepted = 0
    while position < size:
        last = min(position + draft_limit, size - 1)  # not asked: at the limit, or at the text's end, nothing more is drafted
        deep = min(next_deep[position], last)
        counts.ask(start + position, start + min(deep + 1, last))
        _run_cycle(counts, stops[position:deep], deepest)
        right = min(deep, next_wrong[position]) - position
        drafts, accepted = drafts + deep - position, accepted + right
        position += right + 1
    return drafts, accepted


def _run_cycle(counts: LaunchCounts, drafts: list[int], deepest: int) -> None:
    """Run drafts to where each stops, then one token to the end, and all the drafts with it."""
    tokens = len(drafts) + 1
    counts.heads[tokens] += 1
    if deepest == 1:  # the usual case, and what follows would give the same
        counts.batches[0][1] += tokens
        counts.batches[1][tokens] += 1
        return
    waiting = [0] * (deepest + 1)  # tokens at the end of each level
    for stop in (*drafts, deepest):
        _advance(counts, waiting, stop)


def _next(marked: NDArray[np.bool_]) -> list[int]:
    """For each place, the first marked one from there on; the length where there is none."""
    places = np.where(marked, np.arange(len(marked)), len(marked))
    return np.minimum.accumulate(places[::-1])[::-1].tolist()


def _advance(counts: LaunchCounts, waiting: list[int], stop: int) -> None:
    """Run one new token through the levels up to ``stop``, and with it everything that waits on its way."""
    counts.batches[0][1] += 1
    waiting[0] += 1
    for level in range(stop):
        carried = waiting[level]
        counts.batches[level + 1][carried] += 1
        waiting[level + 1] += carried
        waiting[level] = 0


def _deferred_window(run: _Playback, start: int, end: int) -> None:
    deepest, counts = len(run.decisions), run.counts
    waiting = [0] * (deepest + 1)
    for stop in run.stops[start:end].tolist():
        _advance(counts, waiting, stop)
        if stop == deepest:
            counts.heads[1] += 1
            waiting[deepest] = 0
    counts.ask(start, end)


def _propagate_window(run: _Playback, start: int, end: int) -> None:
    deepest, counts, stops = len(run.decisions), run.counts, run.stops[start:end]
    for level in range(deepest + 1):
        needed = int((stops >= level).sum())
        counts.batches[level][1] += needed
        counts.fills[level] += len(stops) - needed
    counts.heads[1] += int((stops == deepest).sum())
    counts.ask(start, end)
