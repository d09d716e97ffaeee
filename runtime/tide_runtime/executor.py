"""The one mechanism of lazy depth: advance segments for the tokens that wait, ask exits, run the head.

Rows stand in slots 0, 1, … A step is a run of slots, so rows between two that are advanced, and rows with fewer tokens than
their neighbours, carry garbage on the right: no valid query sees it and the next write overwrites it (the segment contract).
"""

from __future__ import annotations

import math
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
            ready = [i for i in chosen if self._waiting(rows[i], first)]
            # A row near the end of its cache cannot take its neighbours' garbage: then each runs alone.
            groups = [ready] if ready and self._has_room(rows, ready, first) else [[i] for i in ready]
            for group in groups:
                self._launch(slots, rows, group, first, stop)
            first = stop if ready else first + 1

    def ask(self, slots: Slots, rows: Sequence[Row], chosen: Sequence[int], exit: Exit, least: float) -> list[Guess]:
        """What the exit says of the last token of each chosen row, all of which stand at its boundary.

        ``least``: the score from which on the caller would stop. The head is not asked where an MLP has said no.
        """
        low, info = chosen[0], exit.info
        step = slots.step(low, chosen[-1] - low + 1, 1)
        for i in chosen:
            newest = rows[i].frontier.newest(exit.boundary)
            if exit.graph is not None:
                step.hidden[exit.boundary - 1][i - low, 0] = newest
            if info.head == "identity":
                step.hidden[-1][i - low, 0] = newest
        if exit.graph is not None:
            step.run(exit.graph)
        scores = [float(step.score[i - low, 0]) if info.asks_mlp else 1.0 for i in chosen]
        gate = least if info.router == "mlp" else info.mlp_threshold or 0.0
        passed = [score >= gate for score in scores]  # a NaN passes no gate
        if not any(passed):
            return [Guess(score, -1, None) for score in scores]
        if info.tail_layers:
            self._run_tail(slots, rows, chosen)
        step.run("head")
        return [
            _guess(info.router, score, step.logits[i - low, 0], int(step.token[i - low, 0])) if may else Guess(score, -1, None)
            for i, score, may in zip(chosen, scores, passed, strict=True)
        ]

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
        # Rows in between: behind all they have, or, in a full cache, on the last token, which no later one attends to.
        places = [min(row.frontier.done[0], self._cache_slots - 1) for row in rows[low : chosen[-1] + 1]]
        for i in chosen:
            places[i - low] = rows[i].frontier.done[0] - 1
        step.place(places)
        step.run(self.segments[-1])

    def _waiting(self, row: Row, segment: int) -> int:
        return row.known - row.frontier.done[0] if segment == 0 else row.frontier.waiting(segment)

    def _places(self, rows: Sequence[Row], chosen: Sequence[int], segment: int) -> list[int]:
        """Where each row from the first chosen to the last writes: those in between behind all they have, tails included."""
        low = chosen[0]
        places = [row.frontier.done[0] for row in rows[low : chosen[-1] + 1]]
        for i in chosen:
            places[i - low] = rows[i].frontier.done[segment]
        return places

    def _has_room(self, rows: Sequence[Row], chosen: Sequence[int], segment: int) -> bool:
        count = max(self._waiting(rows[i], segment) for i in chosen)
        return max(self._places(rows, chosen, segment)) + count <= self._cache_slots

    def _launch(self, slots: Slots, rows: Sequence[Row], chosen: Sequence[int], first: int, stop: int) -> None:
        low, counts = chosen[0], [self._waiting(rows[i], first) for i in chosen]
        step = slots.step(low, chosen[-1] - low + 1, max(counts))
        for i, count in zip(chosen, counts, strict=True):
            done = rows[i].frontier.done[first]
            if first == 0:
                step.input_ids[i - low, :count] = rows[i].tokens[done : done + count]
            else:
                step.hidden[first - 1][i - low, :count] = rows[i].frontier.states[first][:count]
        step.place(self._places(rows, chosen, first))
        for segment in self.segments[first:stop]:
            step.run(segment)
        for i, count in zip(chosen, counts, strict=True):
            rows[i].frontier.arrive(first, stop, count, step.hidden[stop - 1][i - low])


def _guess(router: str, score: float, logits: NDArray[np.floating], token: int) -> Guess:
    """The router's word on a row whose head was asked; logits that are not finite clear no threshold."""
    if router != "mlp":
        score = max_probability(logits, token)
    elif not math.isfinite(logits[token]):
        score = math.nan
    return Guess(score, token, logits)


def max_probability(logits: NDArray[np.floating], likeliest: int) -> float:
    """Softmax probability of the likeliest token of logits [V]; NaN when they hold one, which clears no threshold."""
    return 1.0 / float(np.exp(logits - logits[likeliest]).sum())
