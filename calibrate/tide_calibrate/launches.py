"""What a simulated policy launched, counted, and what that costs.

With exits at checkpoints c_1 < … < c_K there are K + 1 levels: level l is the layers from c_l to c_{l+1} (c_0 = 0,
c_{K+1} = L). Each is one segment, or several where the tail of an exit head makes a further cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tide_runtime.calibration import cuts

from tide_calibrate.exit_decisions import ExitDecisions, head_ms, router_ms
from tide_calibrate.step_times import StepTimes


@dataclass
class LaunchCounts:
    """Counts of launches.

    Args:
        tokens: of the text.
        batches: [K + 1][S], how often a level was run for S tokens at once.
        heads: [S], how often the last segment gave the logits of S tokens.
        turns: how often the runtime's own loop came round: for every token that asked, and for every run of the last layers.
        fills: [K + 1], tokens whose K and V of a level were projected instead of computed.
    """

    tokens: int
    batches: list[list[int]]
    heads: list[int]
    fills: list[int]
    turns: int = 0
    _asked: list[tuple[int, int]] = field(default_factory=list)

    @staticmethod
    def zeros(tokens: int, exits: int, most: int) -> LaunchCounts:
        """For a text of ``tokens`` tokens, ``exits`` exits and batches of up to ``most`` tokens."""
        return LaunchCounts(tokens, [[0] * (most + 1) for _ in range(exits + 1)], [0] * (most + 1), [0] * (exits + 1))

    def ask(self, first: int, end: int) -> None:
        """Note that the tokens [first, end) of the text asked their exits, each up to the one where it stopped."""
        self._asked.append((first, end))

    def run_through(self, tokens: int) -> None:
        """Run ``tokens`` new tokens through all levels at once, and the head on each."""
        for batches in (*self.batches, self.heads):
            batches[tokens] += 1

    def processed(self) -> int:
        """Tokens that were run through the first level, each as often as it was."""
        return sum(tokens * count for tokens, count in enumerate(self.batches[0]))

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
    times: StepTimes,
    kv_fill_ms: float = 0.0,
) -> LaunchPrice:
    """The time of all launches in ``counts``; ``stops``: see `first_stops`; ``kv_fill_ms``: of one layer and token."""
    places = cuts([decision.info for decision in decisions], num_layers)
    edges = [0, *(decision.info.checkpoint for decision in decisions), num_layers]
    ms, layers = times.host * counts.turns + float(np.dot(counts.heads, times.logits)), 0
    for level, (first, end) in enumerate(itertools.pairwise(edges)):
        launches = 1 + sum(first < place < end for place in places)
        ms += float(np.dot(counts.batches[level], times.segments(launches, end - first)))
        ms += counts.fills[level] * float(launches * times.launch[1] + (end - first) * kv_fill_ms)
        layers += (end - first) * sum(counts.batches[level])
    asked = counts.asked()
    for index, decision in enumerate(decisions):
        reached = np.where(stops >= index, asked, 0)
        heads = int(reached @ decision.asks_head)
        ms += int(reached.sum()) * router_ms(decision.info, times) + heads * head_ms(decision.info, times)
        layers += heads * decision.info.tail_layers
    return LaunchPrice(ms, layers)
