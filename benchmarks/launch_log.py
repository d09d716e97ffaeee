"""Which graphs were launched, on how many tokens of how many rows: what the backend counts by name, counted by shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import perf_counter

from tide_runtime.backends.base import Backend, Slots, Step
from tide_runtime.policies.base import DepthPolicy
from tide_runtime.row import Row

Launch = tuple[str, int, int]  # graph, rows that have tokens, tokens in all


class LaunchLog:
    """Launches since `clear`, those of prompts apart, and the time that prompts took."""

    def __init__(self) -> None:
        self.prefill: Counter[Launch] = Counter()
        self.decode: Counter[Launch] = Counter()
        self.current = self.decode
        self.prefill_seconds = 0.0

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


class LoggedBackend:
    """A backend whose steps note every launch in ``log``."""

    def __init__(self, backend: Backend, log: LaunchLog) -> None:
        self.name, self.launches = backend.name, backend.launches
        self._backend, self._log = backend, log

    def slots(self, capacity: int) -> Slots:
        return _LoggedSlots(self._backend.slots(capacity), self._log)


class _LoggedSlots:
    def __init__(self, slots: Slots, log: LaunchLog) -> None:
        self.capacity, self.every_layer = slots.capacity, slots.every_layer
        self._slots, self._log = slots, log

    @property
    def layers_launched(self) -> int:
        return self._slots.layers_launched

    @layers_launched.setter
    def layers_launched(self, value: int) -> None:
        self._slots.layers_launched = value

    def step(self, first_row: int, counts: Sequence[int], wanted: Sequence[int] = ()) -> Step:
        rows = sum(count > 0 for count in counts)
        return _LoggedStep(self._slots.step(first_row, counts, wanted), self._log, rows, sum(counts))

    def move_row(self, source: int, target: int, length: int) -> None:
        self._slots.move_row(source, target, length)


class _LoggedStep:
    def __init__(self, step: Step, log: LaunchLog, rows: int, tokens: int) -> None:
        self.input_ids, self.hidden, self.score = step.input_ids, step.hidden, step.score
        self.logits, self.token, self.place = step.logits, step.token, step.place
        self.place_scattered = step.place_scattered
        self._run, self._log, self._shape = step.run, log, (rows, tokens)

    def run(self, graph: str) -> None:
        self._log.current[graph, *self._shape] += 1
        self._run(graph)
