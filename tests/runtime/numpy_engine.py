"""An engine loop over the NumPy backend, whose launches a test can stop, break and watch."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray
from runtime.numpy_backend import NumpyBackend, NumpyContext, NumpyStep, tiny_manifest
from runtime.tiny_generation import Request, make_row
from runtime.tiny_transformer import Array, TinyTransformer
from tide_runtime.backends.kv_caches import blocks_of
from tide_runtime.depth.full import FullDepth
from tide_runtime.generation_params import GenerationParams
from tide_runtime.metrics import EngineMetrics
from tide_runtime.outputs import finished
from tide_runtime.scheduling.handle import GenerationHandle
from tide_runtime.scheduling.loop import EngineLoop, Submitted
from tide_runtime.scheduling.prefix_tree import PrefixTree
from tide_runtime.scheduling.scheduler import Scheduler, SchedulerOptions

POSITIONS, VOCAB = 64, 12
POISON = VOCAB - 1  # a token that the model never says, and after which everything is NaN


class PoisonedTransformer(TinyTransformer):
    """States of the token POISON are NaN: its keys and values, and all that attends to them."""

    def embed(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> Array:
        states = super().embed(tokens, positions)
        return np.where((np.asarray(tokens) == POISON)[..., None], np.nan, states)

    def logits(self, hidden: Array) -> Array:
        logits = super().logits(hidden)
        logits[..., POISON] = np.where(np.isnan(logits[..., POISON]), np.nan, -1e9)
        return logits


class StagedBackend(NumpyBackend):
    """``failures``: so many of the next steps raise RuntimeError. ``breaks_rows``: freeing a row raises too."""

    def __init__(self, model: TinyTransformer, packs_steps: bool = True) -> None:
        super().__init__(tiny_manifest(model, [1]), model, packs_steps=packs_steps)
        self.failures, self.breaks_rows = 0, False
        self.entered = threading.Event()
        self._steps, self._changed = math.inf, threading.Condition()

    def context(self, capacity: int, prefix_blocks: int = 0) -> NumpyContext:
        return StagedContext(self, capacity, prefix_blocks)

    @contextmanager
    def paused(self, after: int = 0) -> Iterator[None]:
        """Within the block, ``after`` more steps run and the next one waits for its end; `entered` is set when a step waits."""
        self.entered.clear()
        self._let(after)
        try:
            yield
        finally:
            self._let(math.inf)

    def _let(self, steps: float) -> None:
        with self._changed:
            self._steps = steps
            self._changed.notify_all()

    def enter(self) -> None:
        with self._changed:
            if self._steps <= 0:
                self.entered.set()
                assert self._changed.wait_for(lambda: self._steps > 0, timeout=60)
            self._steps -= 1
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the backend broke")


class StagedContext(NumpyContext):
    """As real caches, it keeps what a row held when the row is freed, unless that is tainted."""

    backend: StagedBackend

    def step(self, first_row: int, counts: Sequence[int], num_logits: Sequence[int] = ()) -> NumpyStep:
        self.backend.enter()
        return super().step(first_row, counts, num_logits)

    def forget_row(self, row: int, tainted: bool = False) -> None:
        if self.backend.breaks_rows:
            raise RuntimeError("the row cannot be freed")
        if tainted:
            self.release_row(row)


class NumpyEngine:
    """Requests of any thread over a `StagedBackend`, as `Engine.submit` makes them. Policy ``full``.

    Args:
        blocks: of KV memory; None: enough for all rows.
        chunk: prompt tokens of a step.
    """

    def __init__(self, capacity: int = 4, blocks: int | None = None, max_queue: float = math.inf, chunk: int = 16) -> None:
        self.model = PoisonedTransformer(3, (0.5, 0.5, 0.3), VOCAB, POSITIONS)
        self.backend = StagedBackend(self.model)
        self.policy: Any = FullDepth()
        blocks = blocks or 2 * capacity * blocks_of(POSITIONS)
        options = SchedulerOptions(capacity, blocks, POSITIONS, prompt_tokens=lambda decoding: chunk, max_queue=max_queue)
        make_context: Any = partial(self.backend.context, capacity, blocks)
        self.scheduler = Scheduler(options, PrefixTree())
        finish = partial(finished, policy="full", tokenizer=None)
        self.loop = EngineLoop(self.policy, make_context, self.scheduler, finish, EngineMetrics(3))

    def submit(
        self,
        prompt: Sequence[int],
        count: int = 8,
        *,
        priority: int = 0,
        timeout: float = math.inf,
        streamed: bool = True,
        **changes: Any,
    ) -> GenerationHandle:
        request = Submitted(make_row(wanted(prompt, count, **changes), self.backend.manifest), priority, monotonic() + timeout)
        request.handle = GenerationHandle(partial(self.loop.abort, request), streamed)
        self.loop.submit([request])
        return request.handle

    def __enter__(self) -> NumpyEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.stop(abort=True)


def wanted(prompt: Sequence[int], count: int = 8, **changes: Any) -> Request:
    """A request for ``count`` tokens."""
    return Request(tuple(prompt), GenerationParams(max_new_tokens=count, **changes), 0)
