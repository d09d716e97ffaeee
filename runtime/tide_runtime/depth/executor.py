"""The one mechanism of lazy depth: advance segments for the tokens that wait, and evaluate exits.

A step covers consecutive rows of the KV cache. A row between two that are advanced, and one with fewer tokens than the others,
may get garbage after its tokens: no valid query sees it, and the next write overwrites it (the segment contract).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext, Logits, Step
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.exits import Exit, bundle_exits
from tide_runtime.bundle.manifest import HEAD, Manifest
from tide_runtime.depth.frontier import Frontier, LazySequence
from tide_runtime.depth.full import Part, StepRows, finish_chunks, read_logits, run_full, steps_of
from tide_runtime.depth.policy import PromptChunk
from tide_runtime.sequence import TokenSequence, is_finite

_PLAIN_LOGIT = 40.0  # up to which its exponential, summed over any vocabulary, is within float32


class Guess(NamedTuple):
    """An exit's answer about a sequence's last token: the router's ``score``, and the head's ``logits`` [V] and argmax if it
    ran."""

    score: float
    token: int
    logits: NDArray[np.floating] | None


class Executor:
    """Advances sequences through the segments of a bundle; every policy that skips layers is written with it."""

    def __init__(self, manifest: Manifest) -> None:
        self.segments = [segment.name for segment in manifest.segments]
        self.num_segments = len(self.segments)
        self._hidden_width = manifest.hidden_width
        self.exits = bundle_exits(manifest)

    def frontier(self, context: ExecutionContext, sequence: TokenSequence, room: int) -> Frontier:
        """The record of a sequence whose first ``sequence.num_cached_tokens`` tokens have been through every segment."""
        return Frontier(
            self.num_segments,
            self._hidden_width,
            room,
            context.step(sequence.batch_index, [1]).hidden[0],
            sequence.num_cached_tokens,
        )

    def advance(
        self,
        context: ExecutionContext,
        sequences: Sequence[LazySequence],
        chosen: Sequence[int],
        first: int,
        end: int,
        num_logits: Sequence[int] = (),
    ) -> list[Logits]:
        """Run segments ``first`` … ``end - 1`` for all that waits in front of them in the sequences at ``chosen`` (rising).

        Args:
            num_logits: where the model ends at ``end``: of how many of its last tokens each chosen sequence needs the logits.

        Returns those logits, a chosen sequence's after the other's; nothing when none are needed.
        """
        num_logits_of = dict(zip(chosen, num_logits, strict=True)) if num_logits else {}
        logits: dict[int, Logits] = {}
        while first < end:
            # Segments in front of which nothing waits take what arrives, straight from the same buffers.
            stop = first + 1
            while stop < end and all(sequences[i].frontier.done[stop - 1] == sequences[i].frontier.done[stop] for i in chosen):
                stop += 1
            num_logits_here = num_logits_of if stop == self.num_segments else {}
            ready = [i for i in chosen if self._waiting(sequences[i], first)]
            parts = [
                Part(s.sequence.batch_index, self._waiting(s, first), s.frontier.done[first], num_logits_here.get(i, 0))
                for i, s in ((i, sequences[i]) for i in ready)
            ]
            steps = steps_of(context, parts)
            for rows in steps:
                step = self._launch(context, [sequences[ready[part]] for part in rows.parts], parts, rows, first, stop)
                if num_logits_here:
                    counts = {ready[part]: parts[part].num_logits for part in rows.parts}
                    logits |= read_logits(step, counts, rows is not steps[-1])
            first = stop if ready else first + 1
        return [logits[i] for i in num_logits_of]

    def advance_all(
        self,
        context: ExecutionContext,
        sequences: Sequence[LazySequence],
        num_logits: Sequence[int],
        prompts: Sequence[PromptChunk],
    ) -> tuple[list[Logits], list[list[int]]]:
        """Run every segment for all that waits in ``sequences``, and for the ``prompts`` in the same launches where the context
        takes them together.

        Returns the logits of each sequence's last ``num_logits`` tokens, and the first output token of each finished prompt.
        """
        if not context.packs_steps or not prompts:
            first = finish_chunks(prompts, run_full(context, [], prompts)[1])
            return self.advance(context, sequences, range(len(sequences)), 0, self.num_segments, num_logits), first
        chunks = [LazySequence.of_chunk(self.frontier(context, p.sequence, p.tokens), p.sequence, p.tokens) for p in prompts]
        lanes = [*zip(sequences, num_logits, strict=True), *((c, p.num_logits) for c, p in zip(chunks, prompts, strict=True))]
        order = sorted(range(len(lanes)), key=lambda i: lanes[i][0].sequence.batch_index)
        logits = self.advance(
            context, [lanes[i][0] for i in order], range(len(order)), 0, self.num_segments, [lanes[i][1] for i in order]
        )
        found = dict(zip(order, logits, strict=True))
        given = [found[i] for i in range(len(lanes))]
        return given[: len(sequences)], finish_chunks(prompts, given[len(sequences) :])

    def evaluate(
        self,
        context: ExecutionContext,
        sequences: Sequence[LazySequence],
        chosen: Sequence[int],
        early_exit: Exit,
        least: Sequence[float],
    ) -> list[Guess]:
        """Evaluate the exit for the last token of each chosen sequence. All of them stand at its boundary.

        ``least``: the score from which on each sequence stops; negative: whatever the score. Otherwise the head is not run where
        an MLP router rejects.
        """
        info = early_exit.info
        parts = [Part(s.sequence.batch_index, 1, s.frontier.done[0] - 1, 1) for s in (sequences[i] for i in chosen)]
        rows = StepRows.of(parts, range(len(parts)))
        step = context.step(rows.first, rows.tokens, rows.num_logits if info.tail_layers else ())
        for place, i in enumerate(chosen):
            newest = sequences[i].frontier.newest(early_exit.boundary)
            if early_exit.graph is not None or early_exit.score_graph is not None:
                step.hidden[early_exit.boundary - 1][place] = newest
            if info.head == "identity":
                step.hidden[-1][place] = newest
        if early_exit.graph is not None:
            step.run(early_exit.graph)
        scores, passed = self._pass_mlp(step, info, least)
        if not any(passed):
            return [Guess(score, -1, None) for score in scores]
        if info.tail_layers:
            step.place(rows.slots)  # a tail's keys and values are provisional: the real run overwrites them
        step.run(self.segments[-1] if info.tail_layers else HEAD)
        tokens = step.token[: len(chosen)].tolist()
        if early_exit.score_graph is not None:
            step.run(early_exit.score_graph)
            scores = step.score[: len(chosen)].tolist()
        guesses = list[Guess]()
        for place, (score, may, token) in enumerate(zip(scores, passed, tokens, strict=True)):
            if may:
                logits = step.logits[place]
                guesses.append(Guess(head_score(info, score, logits, token), token, logits))
            else:
                guesses.append(Guess(score, -1, None))
        return guesses

    @staticmethod
    def _pass_mlp(step: Step, info: ExitInfo, least: Sequence[float]) -> tuple[Sequence[float], Sequence[bool]]:
        """The MLP's scores, 1 where there is none, and whether each is enough for the head to be run."""
        if not info.has_mlp:
            return [1.0] * len(least), [True] * len(least)
        scores = step.score[: len(least)].tolist()
        return scores, [passes_mlp(info, score, enough) for score, enough in zip(scores, least, strict=True)]

    def _waiting(self, sequence: LazySequence, segment: int) -> int:
        return sequence.num_tokens_with_drafts - sequence.frontier.done[0] if segment == 0 else sequence.frontier.waiting(segment)

    def _launch(
        self,
        context: ExecutionContext,
        sequences: Sequence[LazySequence],
        parts: Sequence[Part],
        rows: StepRows,
        first: int,
        stop: int,
    ) -> Step:
        """Run segments ``first`` … ``stop - 1`` for the tokens of the ``sequences`` that wait in front of ``first``."""
        step = context.step(rows.first, rows.tokens, rows.num_logits if any(rows.num_logits) else ())
        begin = 0
        for part, sequence in zip(rows.parts, sequences, strict=True):
            _, count, slot, _ = parts[part]
            if first == 0:
                step.input_ids[begin : begin + count] = sequence.tokens[slot : slot + count]
            else:
                step.hidden[first - 1][begin : begin + count] = sequence.frontier.states[first][:count]
            begin += count
        step.place(rows.slots)
        step.run_all(context.every_layer if (first, stop) == (0, self.num_segments) else self.segments[first:stop])
        begin = 0
        for part, sequence in zip(rows.parts, sequences, strict=True):
            count = parts[part].tokens
            if stop == self.num_segments:
                sequence.frontier.pass_through(first, stop, count)
            else:
                sequence.frontier.arrive(first, stop, step.hidden[stop - 1][begin : begin + count])
            begin += count
        return step


def passes_mlp(info: ExitInfo, score: float, least: float) -> bool:
    """Whether the MLP's ``score`` lets the head be run for a token that stops from ``least`` on. A NaN never does."""
    return score >= (least if info.decides_before_head else min(least, 0.0) or info.mlp_threshold or 0.0)


def head_score(info: ExitInfo, score: float, logits: NDArray[np.floating], token: int) -> float:
    """What decides about a token with the head's ``logits``, ``token`` their argmax: NaN of logits that hold one, else the
    ``score`` of a graph or the argmax's probability."""
    if not info.decides_before_head and not info.scores_logits:
        return probability(logits, token)
    return score if is_finite(logits, token) else math.nan


def probability(logits: NDArray[np.floating], argmax: int) -> float:
    """Softmax probability of the likeliest token, known to be ``argmax``, of its logits [V]; NaN where they hold one, which
    clears no threshold. In few calls: NumPy's find cold caches after a graph."""
    on_host = isinstance(logits, np.ndarray) and logits.dtype == np.float32
    highest = logits.item(argmax) if on_host and argmax >= 0 else math.nan
    if not abs(highest) <= _PLAIN_LOGIT:
        return float(max_probability(logits[None])[0])
    return math.exp(highest) / float(np.exp(logits).dot(_ones(len(logits))))


@cache
def _ones(count: int) -> NDArray[np.float32]:
    return np.ones(count, np.float32)


def max_probability(logits: NDArray[np.floating]) -> NDArray[np.float32]:
    """Softmax probability [T] of the likeliest token of logits [T, V], of any size; NaN where they hold one."""
    terms = np.array(logits, np.float32)  # on a device they come to the host
    terms -= terms.max(-1, keepdims=True)
    np.exp(terms, out=terms)
    return np.asarray(1.0 / terms.sum(-1))
