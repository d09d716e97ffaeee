"""Prefill in which prompt tokens stop at exits too: policy ``exit`` with ``prefill_exit``.

Tokens of a chunk that clear a checkpoint stop there, and the keys and values of the layers behind it are projected from where
they stopped; the others are put together and go on. Layers behind a checkpoint therefore hold a chunk in another order than
the text's, those that stopped first: a token attends to what stands before it in the text, wherever that lies in the cache, so
the mask goes by positions. Once the prompt is through, all of it stands before every later token, and its order is of no
account. The last token always goes through every layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext, Step
from tide_runtime.bundle.exits import Exit
from tide_runtime.bundle.manifest import HEAD, kv_fill_graph
from tide_runtime.depth.executor import Executor, max_probability
from tide_runtime.sequence import TokenSequence

Positions = NDArray[np.int64]


class ExitingPrefill:
    """``stops``: exits without tails and the score from which on a token stops there, shallow first."""

    def __init__(self, executor: Executor, stops: Sequence[tuple[Exit, float]]) -> None:
        self.executor, self.stops = executor, stops

    def run(self, context: ExecutionContext, sequence: TokenSequence, count: int) -> list[int]:
        """Run the next ``count`` tokens of the sequence's prompt; returns the first output token behind the last ones."""
        if sequence.num_cached_tokens == 0:
            # [i]: the positions of the tokens in the cache of the layers behind stop i, slot by slot
            sequence.policy_state = [np.empty(0, np.int64) for _ in self.stops]
        last = sequence.num_cached_tokens + count == sequence.prompt_tokens
        step = self._chunk(context, sequence, count, last, sequence.policy_state)
        sequence.num_cached_tokens += count
        sequence.prefilled = last
        if not last:
            return []
        assert step is not None  # the last token goes through every layer
        return [sequence.choose(step.logits[0], int(step.token[0]))]

    def _chunk(
        self, context: ExecutionContext, sequence: TokenSequence, count: int, last: bool, layouts: list[Positions]
    ) -> Step | None:
        """The step in which its last tokens went through the last layer; None where all have stopped before."""
        positions = sequence.num_cached_tokens + np.arange(count)
        step = context.step(sequence.batch_index, [count])
        step.input_ids[:count] = sequence.tokens[positions]
        step.place([sequence.num_cached_tokens])
        states = self._segments(step, 0, self.stops[0][0].boundary)[:count].copy()
        stopped = np.empty(0, np.int64)
        for number, (exit, threshold) in enumerate(self.stops):
            leaves = self._score(context, sequence, exit, states) >= threshold
            leaves[-1] &= not last
            self._fill(context, sequence, exit, states[leaves], positions[leaves], len(layouts[number]) + len(stopped))
            sequence.depth.prompt_exits += int(leaves.sum())
            stopped, states, positions = np.append(stopped, positions[leaves]), states[~leaves], positions[~leaves]
            before = np.append(layouts[number], stopped)
            layouts[number] = np.append(before, positions)
            if not len(positions):
                for rest in range(number + 1, len(self.stops)):
                    layouts[rest] = np.append(layouts[rest], stopped)
                return None
            end = self.stops[number + 1][0].boundary if number + 1 < len(self.stops) else self.executor.num_segments
            step = context.step(sequence.batch_index, [len(positions)], [int(last)] if end == self.executor.num_segments else ())
            step.hidden[exit.boundary - 1][: len(positions)] = states
            step.place_scattered(len(before), positions, before)
            states = self._segments(step, exit.boundary, end)[: len(positions)].copy()
        return step

    def _segments(self, step: Step, first: int, end: int) -> NDArray[np.generic]:
        for segment in self.executor.segments[first:end]:
            step.run(segment)
        return step.hidden[end - 1]

    def _score(
        self, context: ExecutionContext, sequence: TokenSequence, exit: Exit, states: NDArray[np.generic]
    ) -> NDArray[np.float32]:
        """Scores [T]; NaN, which clears no threshold, where an MLP router rejects."""
        count, info = len(states), exit.info
        step = context.step(sequence.batch_index, [count])
        step.hidden[exit.boundary - 1][:count] = states
        if exit.graph is not None:
            step.run(exit.graph)
        if info.head == "identity":
            step.hidden[-1][:count] = states
        scores = np.array(step.score[:count])
        if info.decides_before_head:
            return scores
        step.run(HEAD)
        sure = max_probability(step.logits[:count])
        return np.where(scores >= (info.mlp_threshold or 0.0), sure, np.nan) if info.has_mlp else sure

    def _fill(
        self,
        context: ExecutionContext,
        sequence: TokenSequence,
        exit: Exit,
        states: NDArray[np.generic],
        positions: Positions,
        slot: int,
    ) -> None:
        """Project keys and values behind ``exit`` of the tokens at ``positions``, into the cache from ``slot`` on."""
        if len(positions):
            step = context.step(sequence.batch_index, [len(positions)])
            step.hidden[exit.boundary - 1][: len(positions)] = states
            step.place_scattered(slot, positions)
            step.run(kv_fill_graph(exit.info))
