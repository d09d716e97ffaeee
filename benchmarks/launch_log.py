"""Which graphs were launched, on how many tokens of how many rows: what the backend counts by name, counted by shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from tide_runtime.backends.base import Slots
from tide_runtime.policies.base import DepthPolicy
from tide_runtime.row import Row


class Launch(NamedTuple):
    """``graph`` on so many ``tokens`` of ``rows`` rows, ``longest`` of one of them."""

    graph: str
    rows: int
    tokens: int
    longest: int


class LaunchLog:
    """Launches since `clear`, those of prompts apart, and the time that prompts took."""

    def __init__(self) -> None:
        self.prefill: Counter[Launch] = Counter()
        self.decode: Counter[Launch] = Counter()
        self.current = self.decode
        self.prefill_seconds = 0.0

    def launched(self, graph: str, rows: int, tokens: int, longest: int, seconds: float) -> None:
        self.current[Launch(graph, rows, tokens, longest)] += 1

    def clear(self) -> None:
        self.prefill.clear()
        self.decode.clear()
        self.prefill_seconds = 0.0


class LoggedPolicy:
    """A depth policy that tells the log which launches are a prompt's."""

    def __init__(self, policy: DepthPolicy, log: LaunchLog) -> None:
        self.name = policy.name
        self._policy, self._log = policy, log

    def prefill(self, slots: Slots, row: Row) -> int:
        self._log.current, begin = self._log.prefill, perf_counter()
        try:
            return self._policy.prefill(slots, row)
        finally:
            self._log.prefill_seconds += perf_counter() - begin

    def decode(self, slots: Slots, rows: Sequence[Row]) -> list[list[int]]:
        self._log.current = self._log.decode
        return self._policy.decode(slots, rows)
