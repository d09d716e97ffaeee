"""A text played through by a depth policy: where each of its tokens stops, and what was launched so far.

A launch is what costs, so launches are counted by their number of tokens, and the runtime's cost model prices them.
Each window of the trace is one generation of one sequence, and the text's tokens stand in for the tokens chosen: exact for the
model's own greedy output, an approximation after a wrong draft, whose successors are taken to look like the right text's.

With exits at checkpoints c_1 < … < c_K there are K + 1 levels: level l is the layers from c_l to c_{l+1} (c_0 = 0,
c_{K+1} = L). Each is one segment, or several where the tail of an exit head makes a further cut. Tokens that go through all
levels at once take one launch, however many cuts there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import CostTable, ExitInfo, cuts
from tide_runtime.bundle.exits import Exit
from tide_runtime.bundle.manifest import exit_graph
from tide_runtime.costs.cost_model import DEPTH_TURN, FULL_TURN, LOGITS, CostModel, Graph, Launch
from tide_runtime.errors import CalibrationError

from tide_calibrate.certificate.risk import ExitRule
from tide_calibrate.traces.trace import SplitTrace

_LOOKUP = Graph(launches=0, extra_host=1)  # of drafts in the text


@dataclass(frozen=True)
class ExitDecisions:
    """One exit on n tokens.

    Args:
        confident: [n] bool, the router lets the token stop here. A NaN score never does.
        runs_head: [n] bool, the exit head was run to find that out, or for the token that stops.
        agrees: [n] bool, the exit head's likeliest token is the full model's.
    """

    info: ExitInfo
    confident: NDArray[np.bool_]
    runs_head: NDArray[np.bool_]
    agrees: NDArray[np.bool_]


def decide(trace: SplitTrace, info: ExitInfo, threshold: float) -> ExitDecisions:
    """The decisions of exit ``info`` on ``trace`` with ``threshold`` in place of its own.

    Raises CalibrationError when the trace has no such exit or its router was not recorded.
    """
    rule = ExitRule.from_info(info)
    confident, traced = rule.scores(trace) >= threshold, rule.trace(trace)
    if info.decides_before_head:  # the head is only needed for the token that stops
        with_head = confident
    elif info.router == "mlp+max_probability":
        with_head = np.isfinite(traced.scores["mlp"]) & (traced.scores["mlp"] >= (info.mlp_threshold or 0.0))
    else:
        with_head = np.ones(len(confident), bool)
    return ExitDecisions(info, confident, with_head, traced.agrees)


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


@dataclass
class LaunchCounts:
    """Counts of launches.

    Args:
        tokens: number of tokens in the text.
        batches: [K + 1][S], how often a level was run for S tokens at once.
        heads: [S], how often the last segment, run alone, gave the logits of S tokens.
        whole: [S], how often S tokens went through all levels at once, the head on each.
        lookups: how often drafts were looked up in the text, each before a pass of all levels or before exits draft.
    """

    tokens: int
    batches: list[list[int]]
    heads: list[int]
    whole: list[int]
    lookups: int = 0
    _evaluated: list[tuple[int, int]] = field(default_factory=list)

    @staticmethod
    def zeros(tokens: int, exits: int, most: int) -> LaunchCounts:
        """No launches yet of a text of ``tokens`` tokens, with ``exits`` exits and batches of up to ``most`` tokens."""
        sizes = most + 1
        return LaunchCounts(tokens, [[0] * sizes for _ in range(exits + 1)], [0] * sizes, [0] * sizes)

    def evaluate(self, first: int, end: int) -> None:
        """Note that exits were evaluated for the tokens [first, end) of the text, for each up to the one where it stopped."""
        self._evaluated.append((first, end))

    def advance(self, waiting: list[int], stop: int) -> None:
        """Run one new token through the levels up to ``stop``, and with it everything that waits on its way.

        ``waiting``: tokens at the end of each level; changed.
        """
        self.batches[0][1] += 1
        waiting[0] += 1
        for level in range(stop):
            carried = waiting[level]
            self.batches[level + 1][carried] += 1
            waiting[level + 1] += carried
            waiting[level] = 0

    def processed(self) -> int:
        """Tokens that were run through the first level, each as often as it was."""
        return sum(tokens * (one + other) for tokens, (one, other) in enumerate(zip(self.batches[0], self.whole, strict=True)))

    def evaluated(self) -> NDArray[np.int64]:
        """[tokens], how often exits were evaluated for each: a token that was drafted over again is evaluated again."""
        edges = np.array(self._evaluated, np.int64).reshape(-1, 2)
        size = self.tokens + 1
        return np.cumsum(np.bincount(edges[:, 0], minlength=size) - np.bincount(edges[:, 1], minlength=size))[:-1]

    def launches(
        self, model: CostModel, exits: Sequence[Exit], decisions: Sequence[ExitDecisions], stops: NDArray[np.int64]
    ) -> list[Launch]:
        """Everything that was counted, to be priced by ``model``. ``stops``: see `first_stops`."""
        counted = [Launch(_LOOKUP, times=self.lookups)]
        edges = [0, *(early_exit.boundary for early_exit in exits), model.num_segments]
        for (first, end), sizes in zip(pairwise(edges), self.batches, strict=True):
            counted += [model.run(first, end, 1, size)._replace(times=times) for size, times in enumerate(sizes) if times]
        whole = Graph(layers=model.edges[-1], logits=1.0)
        for size, (deep, at_once) in enumerate(zip(self.heads, self.whole, strict=True)):
            if deep:
                counted += [Launch(LOGITS, 1, size, times=deep), Launch(DEPTH_TURN, times=deep)]
            if at_once:
                counted += [Launch(whole, 1, size, times=at_once), Launch(FULL_TURN, times=at_once)]
        evaluated = self.evaluated()
        for index, (early_exit, decision) in enumerate(zip(exits, decisions, strict=True)):
            reached = np.where(stops >= index, evaluated, 0)
            tokens, heads = int(reached.sum()), int(reached @ decision.runs_head)
            router = model.exit(1, early_exit, with_head=False)
            head = model.exit(1, early_exit)[len(router) :]
            counted.append(Launch(DEPTH_TURN, times=tokens))
            counted += [launch._replace(times=tokens) for launch in router]
            counted += [launch._replace(times=heads) for launch in head]
        return counted


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
    return list(pairwise([0, *edges.tolist(), len(trace.window)]))


def cut_model(exits: Sequence[ExitInfo], num_layers: int, costs: CostTable) -> tuple[CostModel, list[Exit]]:
    """The cost model of a model of ``num_layers`` layers that is cut for ``exits``, and the exits with their boundaries."""
    edges = [0, *cuts(exits, num_layers), num_layers]
    placed = [Exit(info, edges.index(info.checkpoint), exit_graph(info) if info.graph_outputs() else None) for info in exits]
    return CostModel(costs, edges), placed


@dataclass(frozen=True)
class Playback:
    """A text, where its tokens stop, and what was launched so far. ``stops``, ``agrees``: see `first_stops`."""

    model: CostModel
    exits: list[Exit]
    decisions: list[ExitDecisions]
    stops: NDArray[np.int64]
    agrees: NDArray[np.bool_]
    counts: LaunchCounts

    @staticmethod
    def prepare(
        trace: SplitTrace, exits: Sequence[ExitInfo], thresholds: Sequence[float], costs: CostTable, most: int
    ) -> Playback:
        """``most``: tokens of the largest batch."""
        check_order(exits, trace.num_layers)
        decisions = [decide(trace, exit, threshold) for exit, threshold in zip(exits, thresholds, strict=True)]
        stops, agrees = first_stops(decisions, len(trace.window))
        counts = LaunchCounts.zeros(len(stops), len(exits), most)
        return Playback(*cut_model(exits, trace.num_layers, costs), decisions, stops, agrees, counts)

    def result(self, policy: str, costs: CostTable, acceptance: float | None, disagreement: float) -> PolicySimulation:
        counts, tokens = self.counts, len(self.stops)
        launches = counts.launches(self.model, self.exits, self.decisions, self.stops)
        ms, cycles = self.model.price(launches) / tokens, sum(counts.heads) + sum(counts.whole)
        return PolicySimulation(
            policy=policy,
            tokens=tokens,
            speedup=costs.unsplit_ms / ms,
            ms_per_token=ms,
            layers_per_token=sum(launch.graph.layers * launch.times for launch in launches) / tokens,
            tokens_per_cycle=tokens / max(1, cycles),
            acceptance=acceptance,
            disagreement=disagreement,
            stops=self._stop_shares(),
        )

    def _stop_shares(self) -> dict[int, float]:
        depths = [*(decision.info.checkpoint for decision in self.decisions), self.model.edges[-1]]
        evaluated, processed = self.counts.evaluated(), self.counts.processed()
        shares = np.bincount(self.stops, weights=evaluated, minlength=len(depths))
        shares[-1] += processed - evaluated.sum()
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
