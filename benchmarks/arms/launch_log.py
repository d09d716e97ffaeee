"""Which graphs were launched, on how many tokens of how many sequences: what the backend counts by name, counted by shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import NamedTuple

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.policy import DepthPolicy, PromptChunk
from tide_runtime.sequence import TokenSequence


class Launch(NamedTuple):
    """``graph`` on so many ``tokens`` of ``rows`` sequences, ``longest`` of one of them."""

    graph: str
    rows: int
    tokens: int
    longest: int


class LaunchLog:
    """Launches since `clear`, those of prompts apart, and the seconds of prompts.

    They are counted on access, as the log is written while clocks run.
    """

    def __init__(self) -> None:
        self._prefill, self._decode = list[tuple[str, int, int, int]](), list[tuple[str, int, int, int]]()
        self._current = self._decode
        self.prefill_seconds = 0.0

    def launched(self, graph: str, rows: int, tokens: int, longest: int, seconds: float) -> None:
        self._current.append((graph, rows, tokens, longest))

    @contextmanager
    def prompt(self) -> Iterator[None]:
        """Launches in this context belong to a prompt."""
        self._current, begin = self._prefill, perf_counter()
        try:
            yield
        finally:
            self._current = self._decode
            self.prefill_seconds += perf_counter() - begin

    @property
    def prefill(self) -> Counter[Launch]:
        """Launches of prompts."""
        return Counter(map(Launch._make, self._prefill))

    @property
    def decode(self) -> Counter[Launch]:
        """Launches of all steps but those of prompts."""
        return Counter(map(Launch._make, self._decode))

    def clear(self) -> None:
        self._prefill.clear()
        self._decode.clear()
        self.prefill_seconds = 0.0


class LoggedPolicy:
    """A depth policy that tells the log which launches are a prompt's."""

    def __init__(self, policy: DepthPolicy, log: LaunchLog) -> None:
        self.name, self.lookahead, self.settled = policy.name, policy.lookahead, policy.settled
        self._policy, self._log = policy, log

    def step(
        self, context: ExecutionContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        with self._log.prompt() if prompts else nullcontext():
            return self._policy.step(context, decoding, prompts)
