"""How long the runtime's own loop takes: a decode step's wall time less the time spent inside graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from tide_runtime import Engine, GenerationParams
from tide_runtime.backends.base import Backend, Slots, Step

PROMPT_TOKENS = 8
STEPS = 48


def measure_host_ms(engine: Engine, rows: int) -> float:
    """Median ms that one decode step of ``rows`` rows spends outside graphs, in ``engine``'s real generation loop."""
    backend = engine.backend
    watched = _WatchedBackend(backend)
    engine.backend = watched
    count = min(STEPS, engine.manifest.max_seq_len - PROMPT_TOKENS)
    try:
        engine.generate([[0] * PROMPT_TOKENS] * rows, GenerationParams(max_new_tokens=count, ignore_eos=True))
    finally:
        engine.backend = backend
    return float(np.median(watched.stopwatch.outside_ms(rows)))


class _Stopwatch:
    """When each step was placed, and how long its graphs ran."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.steps: list[tuple[int, int, float]] = []  # rows, seq, when placed
        self.inside: list[float] = []

    def place(self, rows: int, seq: int) -> None:
        self.steps.append((rows, seq, self.clock()))
        self.inside.append(0.0)

    def outside_ms(self, rows: int) -> list[float]:
        """Of every decode step of ``rows`` rows that another one follows."""
        samples = []
        for i in range(len(self.steps) - 1):
            (*shape, begin), (*following, end) = self.steps[i], self.steps[i + 1]
            if shape == following == [rows, 1]:
                samples.append((end - begin - self.inside[i]) * 1e3)
        return samples


class _WatchedBackend:
    """A backend whose steps report to a stopwatch."""

    def __init__(self, backend: Backend) -> None:
        self.name, self.launches = backend.name, backend.launches
        self.stopwatch = _Stopwatch()
        self._backend = backend

    def slots(self, capacity: int) -> Slots:
        return _WatchedSlots(self._backend.slots(capacity), self.stopwatch)


class _WatchedSlots:
    def __init__(self, slots: Slots, stopwatch: _Stopwatch) -> None:
        self.capacity = slots.capacity
        self._slots, self._stopwatch = slots, stopwatch

    @property
    def layers_launched(self) -> int:
        return self._slots.layers_launched

    @layers_launched.setter
    def layers_launched(self, value: int) -> None:
        self._slots.layers_launched = value

    def step(self, first_row: int, counts: Sequence[int], wanted: Sequence[int] = ()) -> Step:
        return _WatchedStep(self._slots.step(first_row, counts, wanted), self._stopwatch, len(counts), max(counts))

    def move_row(self, source: int, target: int, length: int) -> None:
        self._slots.move_row(source, target, length)


class _WatchedStep:
    def __init__(self, step: Step, stopwatch: _Stopwatch, rows: int, seq: int) -> None:
        self.input_ids, self.hidden, self.score = step.input_ids, step.hidden, step.score
        self.logits, self.token = step.logits, step.token
        self.place_scattered = step.place_scattered
        self._step, self._stopwatch, self._shape = step, stopwatch, (rows, seq)

    def place(self, lengths: Sequence[int]) -> None:
        self._stopwatch.place(*self._shape)
        self._step.place(lengths)

    def run(self, graph: str) -> None:
        begin = self._stopwatch.clock()
        self._step.run(graph)
        self._stopwatch.inside[-1] += self._stopwatch.clock() - begin
