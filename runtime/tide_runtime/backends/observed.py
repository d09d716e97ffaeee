"""Wrapper that reports every graph launch of a backend to an observer, for profilers, benchmarks and cost measurements."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

from tide_runtime.backends.base import Backend, ExecutionContext, Step
from tide_runtime.backends.step_arrays import RowPadding
from tide_runtime.bundle.calibration import CostTable


class Observer(Protocol):
    """Receives the launches of an `ObservedBackend`."""

    def launched(self, graph: str, rows: int, tokens: int, longest: int, seconds: float) -> None:
        """``graph`` ran for ``seconds`` wall time on ``tokens`` tokens of ``rows`` sequences, at most ``longest`` of one."""


class ObservedBackend:
    """Delegates to ``backend`` and reports its launches to ``observer``."""

    def __init__(self, backend: Backend, observer: Observer) -> None:
        self.name, self.launches, self.kv_bytes_per_token = backend.name, backend.launches, backend.kv_bytes_per_token
        self.packs_steps, self.has_prefix_blocks = backend.packs_steps, backend.has_prefix_blocks
        self._backend, self._observer = backend, observer

    @property
    def row_padding(self) -> RowPadding | None:
        return self._backend.row_padding

    @property
    def padding_price(self) -> float:
        return self._backend.padding_price

    @property
    def pass_costs(self) -> CostTable | None:
        return self._backend.pass_costs

    def context(self, capacity: int, prefix_blocks: int = 0) -> ExecutionContext:
        """An execution context of the backend whose launches are reported."""
        return _ObservedContext(self._backend.context(capacity, prefix_blocks), self._observer)


class _ObservedContext:
    def __init__(self, context: ExecutionContext, observer: Observer) -> None:
        self.capacity, self.every_layer = context.capacity, context.every_layer
        self.packs_steps, self.prefix_blocks = context.packs_steps, context.prefix_blocks
        self.has_draft_head = context.has_draft_head
        self._context, self._observer = context, observer

    @property
    def layers_launched(self) -> int:
        return self._context.layers_launched

    @layers_launched.setter
    def layers_launched(self, value: int) -> None:
        self._context.layers_launched = value

    def step(self, first_index: int, counts: Sequence[int], wanted: Sequence[int] = ()) -> Step:
        size = sum(count > 0 for count in counts), sum(counts), max(counts)
        return _ObservedStep(self._context.step(first_index, counts, wanted), self._observer, size)

    def fits_together(self, first_index: int, counts: Sequence[int], num_cached_tokens: Sequence[int]) -> bool:
        return self._context.fits_together(first_index, counts, num_cached_tokens)

    def forget_row(self, row: int, tainted: bool = False) -> None:
        self._context.forget_row(row, tainted)

    def release_row(self, row: int) -> None:
        self._context.release_row(row)

    def move_row(self, source: int, target: int, num_cached_tokens: int) -> None:
        self._context.move_row(source, target, num_cached_tokens)

    def close(self) -> None:
        self._context.close()


class _ObservedStep:
    def __init__(self, step: Step, observer: Observer, size: tuple[int, int, int]) -> None:
        self.input_ids, self.hidden, self.score = step.input_ids, step.hidden, step.score
        self.logits, self.token, self.place = step.logits, step.token, step.place
        self.before, self.states = step.before, step.states
        self.place_scattered = step.place_scattered
        self._run, self._observer, self._size = step.run, observer, size

    def run(self, graph: str) -> None:
        begin = perf_counter()
        self._run(graph)
        self._observer.launched(graph, *self._size, perf_counter() - begin)
