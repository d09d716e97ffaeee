"""What a simulated policy launched, counted, and what that costs.

With exits at checkpoints c_1 < … < c_K there are K + 1 levels: level l is the layers from c_l to c_{l+1} (c_0 = 0,
c_{K+1} = L). Each is one segment, or several where the tail of an exit head makes a further cut. Tokens that go through all
levels at once take one launch, however many cuts there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import cuts
from tide_runtime.costs.cost_model import StepCurve

from tide_calibrate.simulation.exit_decisions import ExitDecisions, head_ms, router_ms

STREAK = 16  # early stops in a row that are told apart


@dataclass
class LaunchCounts:
    """Counts of launches.

    Args:
        tokens: of the text.
        batches: [K + 1][S], how often a level was run for S tokens at once.
        heads: [S], how often the last segment, run alone, gave the logits of S tokens.
        whole: [S], how often S tokens went through all levels at once, the head on each.
        warm: [STREAK + 1], runs of the first level for one token, by how many turns stopped early since the last deep one.
        lookups: of drafts in the text, each before a pass of all levels or before exits draft.
        fills: [K + 1], tokens whose K and V of a level were projected instead of computed.
    """

    tokens: int
    batches: list[list[int]]
    heads: list[int]
    whole: list[int]
    warm: list[int]
    fills: list[int]
    lookups: int = 0
    _asked: list[tuple[int, int]] = field(default_factory=list)

    @staticmethod
    def zeros(tokens: int, exits: int, most: int) -> LaunchCounts:
        """For a text of ``tokens`` tokens, ``exits`` exits and batches of up to ``most`` tokens."""
        levels, sizes = exits + 1, most + 1
        batches = [[0] * sizes for _ in range(levels)]
        return LaunchCounts(tokens, batches, [0] * sizes, [0] * sizes, [0] * (STREAK + 1), [0] * levels)

    def enter(self, streak: int) -> None:
        """Run one new token through the first level; ``streak``: turns that stopped early since the last deep one."""
        self.batches[0][1] += 1
        self.warm[min(streak, STREAK)] += 1

    def ask(self, first: int, end: int) -> None:
        """Note that the tokens [first, end) of the text asked their exits, each up to the one where it stopped."""
        self._asked.append((first, end))

    def processed(self) -> int:
        """Tokens that were run through the first level, each as often as it was."""
        return sum(tokens * (one + other) for tokens, (one, other) in enumerate(zip(self.batches[0], self.whole, strict=True)))

    def asked(self) -> NDArray[np.int64]:
        """[tokens], how often each asked: a token that was drafted over again asks again."""
        edges = np.array(self._asked, np.int64).reshape(-1, 2)
        size = self.tokens + 1
        return np.cumsum(np.bincount(edges[:, 0], minlength=size) - np.bincount(edges[:, 1], minlength=size))[:-1]


@dataclass(frozen=True)
class LaunchPrice:
    """``ms`` in all; ``layers``: decoder layers launched, a batch of tokens counted once."""

    ms: float
    layers: int


def price(
    counts: LaunchCounts,
    decisions: Sequence[ExitDecisions],
    stops: NDArray[np.int64],
    num_layers: int,
    times: StepCurve,
    fill_share: float = 0.0,
) -> LaunchPrice:
    """The time of all launches in ``counts``; ``stops``: see `first_stops`; ``fill_share``: see `CostModel`."""
    infos = [decision.info for decision in decisions]
    places, edges = cuts(infos, num_layers), [0, *(info.checkpoint for info in infos), num_layers]
    whole, deep = sum(counts.whole), sum(counts.heads)
    ms, layers = float(np.dot(counts.whole, times.whole(num_layers)) + np.dot(counts.heads, times.logits_ms)), whole * num_layers
    ms += float(times.host_ms[1]) * whole + times.verification_host_ms * deep
    ms += float(times.lookup_extra_ms[1]) * counts.lookups
    for level, (first, end) in enumerate(itertools.pairwise(edges)):
        launches = 1 + sum(first < place < end for place in places)
        ms += float(np.dot(counts.batches[level], times.segments(launches, end - first)))
        ms += counts.fills[level] * float(launches * times.launch_ms[1] + (end - first) * fill_share * float(times.layer_ms[1]))
        layers += (end - first) * sum(counts.batches[level])
    asked, head = counts.asked(), 0.0
    for index, info in enumerate(infos):
        reached = np.where(stops >= index, asked, 0)
        heads = int(reached @ decisions[index].asks_head)
        ms += int(reached.sum()) * (router_ms(info, times) + times.evaluation_host_ms)
        head += heads * head_ms(info, times)
        layers += heads * info.tail_layers
    ms += head
    if infos:
        saved = 1 - _mean_share(counts, times, infos[0].checkpoint + infos[0].tail_layers, num_layers)
        ms -= saved * (sum(counts.warm) * float(times.segments(1, infos[0].checkpoint)[1]) + head)
    return LaunchPrice(ms, layers)


def _mean_share(counts: LaunchCounts, times: StepCurve, depth: int, num_layers: int) -> float:
    """What a token's run of the first level, and asking, takes of its cost among passes through all ``num_layers`` layers."""
    shares = times.table.warm_shares(depth, num_layers)
    by_streak = shares[np.minimum(np.arange(STREAK + 1), len(shares) - 1)]
    return float(np.average(by_streak, weights=counts.warm)) if any(counts.warm) else 1.0
