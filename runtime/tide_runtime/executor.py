"""The one mechanism of lazy depth: advance segments for the tokens that wait, ask exits, run the head.

Rows stand in slots 0, 1, … A step is a run of slots, so rows between two that are advanced, and rows with fewer tokens than
their neighbours, carry garbage on the right: no valid query sees it and the next write overwrites it (the segment contract).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import Slots
from tide_runtime.exits import Exit, bundle_exits
from tide_runtime.frontier import Frontier
from tide_runtime.manifest import Manifest
from tide_runtime.row import Row


@dataclass(frozen=True, slots=True)
class Guess:
    """What an exit says of a row's last token: the router's ``score``; when the head was asked, its ``logits`` [V] and argmax."""

    score: float
    token: int
    logits: NDArray[np.floating] | None


@dataclass(frozen=True, slots=True)
class Logits:
    """The model's own ``logits`` [S, V] for the last S tokens of a row, and the argmax of each."""

    logits: NDArray[np.floating]
    tokens: list[int]


class Executor:
    """Advances rows through the segments of a bundle; every policy that skips layers is written with it."""

    def __init__(self, manifest: Manifest) -> None:
        self.segments = [segment.name for segment in manifest.segments]
        self.depth = len(self.segments)
        self._cache_slots, self._hidden_size = manifest.max_seq_len, manifest.model.hidden_size
        self.exits = bundle_exits(manifest)

    def frontier(self, slots: Slots, row: Row, room: int) -> Frontier:
        """The record of a row whose first ``row.length`` tokens have been through every segment."""
        dtype = slots.step(row.slot, 1, 1).hidden[0].dtype
        return Frontier(self.depth, self._hidden_size, room, dtype, row.length)

    def advance(self, slots: Slots, rows: Sequence[Row], chosen: Sequence[int], first: int, end: int) -> None:
        """Run segments ``first`` … ``end - 1`` for all that waits in front of them in the rows at ``chosen`` (rising)."""
        while first < end:
            # Segments in front of which nothing waits take what arrives, straight from the same buffers.
            stop = first + 1
            while stop < end and all(rows[i].frontier.done[stop - 1] == rows[i].frontier.done[stop] for i in chosen):
                stop += 1
            counts = [self._waiting(rows[i], first) for i in chosen]
            if not any(counts):
                first += 1
                continue
            if self._has_room(rows[chosen[0] : chosen[-1] + 1], first, max(counts)):
                self._launch(slots, rows, chosen, counts, first, stop)
            else:  # a row near the end of its cache cannot take its neighbours' garbage
                for i, count in zip(chosen, counts, strict=True):
                    self._launch(slots, rows, [i], [count], first, stop)
            first = stop

    def ask(self, slots: Slots, rows: Sequence[Row], chosen: Sequence[int], exit: Exit) -> list[Guess]:
        """What the exit says of the last token of each chosen row, all of which stand at its boundary."""
        low, info = chosen[0], exit.info
        step = slots.step(low, chosen[-1] - low + 1, 1)
        state = step.hidden[-1] if exit.graph is None else step.hidden[exit.boundary - 1]
        for i in chosen:
            state[i - low, 0] = rows[i].frontier.newest(exit.boundary)
        scores = None
        if exit.graph is not None:
            step.run(exit.graph)
            if info.asks_mlp:
                scores = [float(step.score[i - low, 0]) for i in chosen]
                least = info.mlp_threshold or 0.0
                if info.router == "mlp+max_probability" and not any(score >= least for score in scores):
                    return [Guess(0.0, -1, None)] * len(chosen)
        if info.tail_layers:
            self._run_tail(slots, rows, chosen)
        step.run("head")
        guesses = []
        for n, i in enumerate(chosen):
            logits, token = step.logits[i - low, 0], int(step.token[i - low, 0])
            if scores is None or info.router != "mlp":
                score = max_probability(logits, token)
                if scores is not None and not scores[n] >= (info.mlp_threshold or 0.0):
                    score = 0.0
            else:
                score = scores[n]
            guesses.append(Guess(score, token, logits))
        return guesses

    def head(self, slots: Slots, rows: Sequence[Row], chosen: Sequence[int], counts: Sequence[int]) -> list[Logits]:
        """The model's own logits for the last ``counts`` tokens that reached the end in each chosen row's last advance."""
        low, seq = chosen[0], max(counts)
        step = slots.step(low, chosen[-1] - low + 1, seq)
        for i, count in zip(chosen, counts, strict=True):
            step.hidden[-1][i - low, :count] = rows[i].frontier.final(count)
        step.run("head")
        return [
            Logits(step.logits[i - low, :count], step.token[i - low, :count].tolist())
            for i, count in zip(chosen, counts, strict=True)
        ]

    def _run_tail(self, slots: Slots, rows: Sequence[Row], chosen: Sequence[int]) -> None:
        """The last segment on translated states. Its keys and values are provisional: the real run overwrites them."""
        low = chosen[0]
        step = slots.step(low, chosen[-1] - low + 1, 1)
        places = [row.frontier.done[-1] for row in rows[low : chosen[-1] + 1]]
        for i in chosen:
            places[i - low] = rows[i].frontier.done[0] - 1
        step.place(places)
        step.run(self.segments[-1])

    def _waiting(self, row: Row, segment: int) -> int:
        return row.known - row.frontier.done[0] if segment == 0 else row.frontier.waiting(segment)

    def _has_room(self, rows: Sequence[Row], segment: int, count: int) -> bool:
        return len(rows) == 1 or all(row.frontier.done[segment] + count <= self._cache_slots for row in rows)

    def _launch(
        self, slots: Slots, rows: Sequence[Row], chosen: Sequence[int], counts: Sequence[int], first: int, stop: int
    ) -> None:
        low = chosen[0]
        step = slots.step(low, chosen[-1] - low + 1, max(counts))
        for i, count in zip(chosen, counts, strict=True):
            done = rows[i].frontier.done[first]
            if first == 0:
                step.input_ids[i - low, :count] = rows[i].tokens[done : done + count]
            else:
                step.hidden[first - 1][i - low, :count] = rows[i].frontier.states[first][:count]
        step.place([row.frontier.done[first] for row in rows[low : chosen[-1] + 1]])
        for segment in self.segments[first:stop]:
            step.run(segment)
        for i, count in zip(chosen, counts, strict=True):
            rows[i].frontier.arrive(first, stop, count, step.hidden[stop - 1][i - low])


def max_probability(logits: NDArray[np.floating], likeliest: int) -> float:
    """Softmax probability of the likeliest token of logits [V]; NaN when they hold one, which clears no threshold."""
    return 1.0 / float(np.exp(logits - logits[likeliest]).sum())
