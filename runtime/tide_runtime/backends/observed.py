"""A backend whose every launch is reported to somebody: what profilers, benchmarks and the cost model look through."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

from tide_runtime.backends.base import Backend, ExecutionContext, Step


class Observer(Protocol):
    """Whoever wants to know."""

    def launched(self, graph: str, rows: int, tokens: int, longest: int, seconds: float) -> None:
        """``graph`` has run for so many wall ``seconds`` on ``tokens`` tokens of ``rows`` rows, ``longest`` of one of them."""


class ObservedBackend:
    """``backend``, whose launches go to ``observer``."""

    def __init__(self, backend: Backend, observer: Observer) -> None:
        self.name, self.launches = backend.name, backend.launches
        self._backend, self._observer = backend, observer

    def context(self, capacity: int) -> ExecutionContext:
        """ExecutionContext of the backend, observed."""
        return _ObservedContext(self._backend.context(capacity), self._observer)


class _ObservedContext:
    def __init__(self, context: ExecutionContext, observer: Observer) -> None:
        self.capacity, self.every_layer = context.capacity, context.every_layer
        self._context, self._observer = context, observer

    @property
    def layers_launched(self) -> int:
        return self._context.layers_launched

    @layers_launched.setter
    def layers_launched(self, value: int) -> None:
        self._context.layers_launched = value

    def step(self, first_row: int, counts: Sequence[int], wanted: Sequence[int] = ()) -> Step:
        rows = sum(count > 0 for count in counts)
        return _ObservedStep(self._context.step(first_row, counts, wanted), self._observer, (rows, sum(counts), max(counts)))

    def clear(self) -> None:
        self._context.clear()

    def move_row(self, source: int, target: int, length: int) -> None:
        self._context.move_row(source, target, length)

    def close(self) -> None:
        self._context.close()


class _ObservedStep:
    def __init__(self, step: Step, observer: Observer, size: tuple[int, int, int]) -> None:
        self.input_ids, self.hidden, self.score = step.input_ids, step.hidden, step.score
        self.logits, self.token, self.place = step.logits, step.token, step.place
        self.place_scattered = step.place_scattered
        self._run, self._observer, self._size = step.run, observer, size

    def run(self, graph: str) -> None:
        begin = perf_counter()
        self._run(graph)
        self._observer.launched(graph, *self._size, perf_counter() - begin)
