"""Wrapper that reports every graph launch of a backend to an observer, for profilers, benchmarks and cost measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Protocol, cast

from tide_runtime.backends.base import Backend, ExecutionContext, LoopStep, Step, wait_for
from tide_runtime.lora import LoraAdapter


class Observer(Protocol):
    """Receives the launches of an `observed` backend."""

    def launched(self, graph: str, rows: int, tokens: int, longest: int, seconds: float) -> None:
        """``graph`` ran for ``seconds`` wall time, on a GPU until it was done, on ``tokens`` tokens of ``rows`` sequences, at
        most ``longest`` of one."""


def observed(backend: Backend, observer: Observer) -> Backend:
    """``backend``, whose launches are reported to ``observer``."""
    return cast(Backend, _ObservedBackend(backend, observer))


class _Delegate:
    """Has the attributes of ``inner``, but for those that its class defines."""

    def __init__(self, inner: Any, observer: Observer) -> None:
        self._inner, self._observer = inner, observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _ObservedBackend(_Delegate):
    device = None  # or a loop would run there, whose launches are not the host's

    def with_bits(self, bits: str) -> Backend:
        return observed(self._inner.with_bits(bits), self._observer)

    def with_adapters(self, adapters: Sequence[LoraAdapter]) -> Backend:
        return observed(self._inner.with_adapters(adapters), self._observer)

    def without_draft_head(self) -> Backend:
        return observed(self._inner.without_draft_head(), self._observer)

    def context(self, capacity: int, prefix_blocks: int = 0, **options: Any) -> ExecutionContext:
        inner = self._inner.context(capacity, prefix_blocks, **options)
        return cast(ExecutionContext, _ObservedContext(inner, self._observer, partial(wait_for, self._inner)))


class _ObservedContext(_Delegate):
    def __init__(self, inner: ExecutionContext, observer: Observer, wait: Callable[[], None]) -> None:
        super().__init__(inner, observer)
        self._wait = wait

    def step(self, first_index: int, counts: Sequence[int], num_logits: Sequence[int] = ()) -> Step:
        size = sum(count > 0 for count in counts), sum(counts), max(counts)
        return cast(Step, _ObservedStep(self._inner.step(first_index, counts, num_logits), self._observer, self._wait, size))

    def loop_step(self, first_index: int, counts: Sequence[int], num_logits: Sequence[int]) -> LoopStep:
        size = sum(count > 0 for count in counts), sum(counts), max(counts)
        step = self._inner.loop_step(first_index, counts, num_logits)
        return cast(LoopStep, _ObservedStep(step, self._observer, self._wait, size))


class _ObservedStep(_Delegate):
    def __init__(self, step: Step, observer: Observer, wait: Callable[[], None], size: tuple[int, int, int]) -> None:
        super().__init__(step, observer)
        self._wait, self._size = wait, size

    def run_all(self, graphs: Sequence[str]) -> None:
        for graph in graphs:  # each is reported
            self.run(graph)

    def run(self, graph: str) -> None:
        begin = perf_counter()
        self._inner.run(graph)
        self._wait()
        self._observer.launched(graph, *self._size, perf_counter() - begin)
