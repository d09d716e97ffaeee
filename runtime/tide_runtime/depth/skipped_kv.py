"""What becomes of the layers that a token skipped, once a later token attends to their keys and values: two answers.

``deferred``   the layers are run after all, for all tokens that wait, together with the token that needs them
``propagate``  keys and values are projected from the state the token stopped with, and the layers are never run
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.executor import Executor
from tide_runtime.depth.frontier import LazySequence


class SkippedLayers(Protocol):
    def make_way(self, context: ExecutionContext, sequences: Sequence[LazySequence], chosen: Sequence[int]) -> None:
        """The last tokens of the chosen sequences are about to pass a boundary in front of which others may wait."""

    def complete(self, context: ExecutionContext, sequences: Sequence[LazySequence], chosen: Sequence[int]) -> None:
        """Let no token of the chosen sequences wait any longer."""

    def run_deep(self, waited: int) -> int:
        """How many of ``waited`` tokens, the last one of a sequence among them, are run through the layers they skipped."""


class Deferred:
    """An advance takes along all that waits, so there is nothing to do before one."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def make_way(self, context: ExecutionContext, sequences: Sequence[LazySequence], chosen: Sequence[int]) -> None:
        pass

    def complete(self, context: ExecutionContext, sequences: Sequence[LazySequence], chosen: Sequence[int]) -> None:
        self.executor.advance(context, sequences, chosen, 1, self.executor.num_segments)

    def run_deep(self, waited: int) -> int:
        return waited


class Propagated:
    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def make_way(self, context: ExecutionContext, sequences: Sequence[LazySequence], chosen: Sequence[int]) -> None:
        behind = [i for i in chosen if sequences[i].num_tokens_with_drafts - sequences[i].frontier.done[-1] > 1]
        if behind:
            self.executor.fill(context, sequences, behind)

    def complete(self, context: ExecutionContext, sequences: Sequence[LazySequence], chosen: Sequence[int]) -> None:
        self.executor.fill(context, sequences, chosen)

    def run_deep(self, waited: int) -> int:
        return min(waited, 1)
