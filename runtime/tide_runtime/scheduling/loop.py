"""The engine loop: one thread that steps while there is work, for requests of any number of threads and event loops."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import cast

from tide_runtime.backends.base import ExecutionContext, PrefixMemory
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.errors import DeviceMemoryError, EngineClosedError
from tide_runtime.metrics import EngineMetrics, EngineStats
from tide_runtime.outputs import Chunk, Generation
from tide_runtime.prefix_cache_folder import FileCounts
from tide_runtime.scheduling.handle import GenerationHandle
from tide_runtime.scheduling.scheduler import Request, Scheduler, StepPlan
from tide_runtime.scheduling.step import append_tokens, run_step
from tide_runtime.sequence import FinishReason, TokenSequence

_log = logging.getLogger("tide_runtime")
_MAX_FAILURES = 3  # steps in a row; then the backend is given up
_BATCH_WINDOW_S = 0.0003  # seconds; an idle engine waits this long for further requests, and each arrival restarts the wait


@dataclass(eq=False)
class Submitted(Request):
    """A request and its caller's handle."""

    handle: GenerationHandle = field(init=False)


class EngineLoop:
    """Runs the requests of an engine. The thread starts with the first one and sleeps while there is none.

    A request whose logits are not finite ends alone. When the memory of a device is short, fewer requests run at once. When the
    backend raises anything else, the running requests end with its error and the loop goes on; after three such steps in a row
    the loop is dead, and all requests end with an error.

    Args:
        make_context: makes the caches, in the loop's thread or in that of `prepare`.
        finish: makes the result of a sequence that has ended.
    """

    def __init__(
        self,
        policy: DepthPolicy,
        make_context: Callable[[], ExecutionContext],
        scheduler: Scheduler,
        finish: Callable[[TokenSequence], Generation],
        metrics: EngineMetrics,
    ) -> None:
        self.policy = policy
        self.scheduler = scheduler
        self.metrics = metrics
        self.context: ExecutionContext | None = None
        self._make_context = make_context
        self._finish = finish
        self._disk = scheduler.cache.disk
        self._changed = threading.Condition()  # guards the scheduler's queues, and all below
        self._aborted: list[Submitted] = []
        self._thread: threading.Thread | None = None
        self._step_began: float | None = None  # None: no step runs
        self._process = os.getpid()
        self._failures = 0
        self._stop: str | None = None  # None, "drain" or "abort"
        self._dead: BaseException | None = None

    @property
    def healthy(self) -> bool:
        """Whether requests are taken."""
        return self._stop is None and self._dead is None and self._process == os.getpid()

    @property
    def step_time(self) -> float:
        """Seconds that the running step has taken so far; 0 while none runs."""
        began = self._step_began
        return 0.0 if began is None else monotonic() - began

    def stats(self, block_bytes: int) -> EngineStats:
        """The state of the queue and of KV memory, in blocks of ``block_bytes``, and totals."""
        scheduler = self.scheduler
        with self._changed:
            return self.metrics.stats(
                waiting=scheduler.waiting,
                running=len(scheduler.running),
                preemptions=scheduler.preemptions,
                rotary_restarts=scheduler.rotary_restarts,
                kv_bytes=scheduler.blocks_in_rows * block_bytes,
                prefix_bytes=scheduler.cache.blocks * block_bytes,
                free_bytes=scheduler.free_blocks * block_bytes,
                kv_memory=scheduler.options.blocks * block_bytes,
                snapshots=scheduler.cache.snapshots,
                prefix_disk=self._disk.files.counts if self._disk is not None else FileCounts(),
            )

    def submit(self, requests: Sequence[Submitted], forced: bool = False) -> None:
        """Queue requests, so that the first ones of them start together. Raises QueueFullError unless ``forced``, and
        EngineClosedError."""
        self._check_open()
        with self._changed:
            self._check_open()
            for request in requests:
                self.scheduler.add(request, forced)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tide-engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def prepare(self) -> None:
        """Make the caches before the first step does. Where memory is short, that step tries again."""
        with suppress(DeviceMemoryError):
            self.context = self._make_context()

    def abort(self, request: Submitted) -> None:
        """End a request after the step in progress."""
        if self._process == os.getpid():  # the lock may have been held when the process was forked
            with self._changed:
                self._aborted.append(request)
                self._changed.notify_all()

    def stop(self, abort: bool) -> None:
        """Take no more requests, and wait until those in progress are finished, or cancelled when ``abort``."""
        if self._process != os.getpid():
            return
        with self._changed:
            self._stop = "abort" if abort or self._stop == "abort" else "drain"
            thread = self._thread
            self._changed.notify_all()
        # The garbage collector may call this in the thread that writes prefixes. The loop's thread joins that one at its end.
        if thread is not None and threading.current_thread() not in (thread, self._disk and self._disk.writer):
            thread.join()
        if thread is None and self.context is not None:
            self.context.close()

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise EngineClosedError("the engine was loaded before this process was forked; load it in this process")
        if self._dead is not None:
            raise EngineClosedError(f"the engine has failed ({self._dead}); load it again") from self._dead
        if self._stop is not None:
            raise EngineClosedError("the engine is closed; load it again")

    # --- in the loop's thread

    def _run(self) -> None:
        try:
            while (plan := self._next_plan()) is not None:
                self._step_began = monotonic()
                self._step(plan)
                self._step_began = None
                del plan  # its requests keep the engine alive
        except BaseException as error:  # a bug here must not leave callers waiting
            self._die(error)
        finally:
            with self._changed:
                for request in self.scheduler.requests():
                    self.scheduler.remove(request)
                    self._end(request, "cancelled")
            if self._disk is not None:
                self._disk.close()
            if self.context is not None:
                self.context.close()

    def _next_plan(self) -> StepPlan | None:
        """Wait for work and plan a step; None when the loop is to end."""
        with self._changed:
            while True:
                self._end_aborted()
                if self._stop == "abort":
                    return None
                if self.scheduler.has_work:
                    if not self.scheduler.running:
                        self._gather()
                    return self.scheduler.step(monotonic(), self._unlocked if self._disk is not None else nullcontext)
                if self._stop is not None:
                    return None
                self._changed.wait()

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        """Let callers, event loops among them, take the lock that `_next_plan` holds."""
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()

    def _gather(self) -> None:
        """Wait for callers that submit at the same moment: prompts that share the first step share all that follow."""
        for _ in range(self.scheduler.options.max_batch):
            if self._stop is not None or not self._changed.wait(_BATCH_WINDOW_S):
                return

    def _end_aborted(self) -> None:
        for request in self._aborted:
            if not request.handle.done:
                if request.sequence.batch_index >= 0:
                    self._save(request)
                self._leave(request)
                self._end(request, "cancelled")
        self._aborted.clear()

    def _step(self, plan: StepPlan) -> None:
        began = perf_counter()
        for request in plan.expired:
            self._end(request, "deadline")
        try:
            if self.context is None:
                self.context = self._make_context()
                if self._disk is not None and self.context.prefix_blocks is not None:
                    self._disk.attach(cast(PrefixMemory, self.context.prefix_blocks), self.context.snapshots)
            outcome = run_step(self.policy, self.context, plan)
        except DeviceMemoryError as error:
            if not self._use_fewer_rows(error):
                self._failures = 0  # the backend works, and others may need less
                self._fail(error)
            return
        except Exception as error:
            self._fail(error)
            return
        self._failures = 0
        for request, new in outcome:
            try:
                self._deliver(request, new)
            except Exception as error:  # decoding its text, for example
                self._leave(request)
                _handle(request).fail(error)
        for request, _ in plan.prompts:
            if request.sequence.batch_index >= 0:
                self._save(request)
                if request.sequence.prefilled:
                    self.scheduler.cache.store(request.sequence)
        for request in plan.recalls:
            self.scheduler.recall(request)
        decoded = sum(len(tokens) for _, tokens in outcome[: len(plan.decoding)])
        self.metrics.stepped(decoded + sum(tokens for _, tokens in plan.prompts), perf_counter() - began)

    def _deliver(self, request: Request, tokens: list[int]) -> None:
        sequence = request.sequence
        handle = _handle(request)
        history = sequence.history
        before = sequence.history.latest_token
        for event in append_tokens(sequence, tokens):
            self.metrics.took_token(history.latest_token - (before or history.submitted), first=not before)
            before = history.latest_token
            depth = sequence.latest_depth(self.metrics.num_layers)
            logprob = sequence.logprobs[sequence.num_tokens - sequence.prompt_tokens - 1] if sequence.params.logprobs else None
            if sequence.finish_reason is not None:
                last = Chunk(event.text, event.token, self._finish(sequence), depth, logprob)
                self._save(request)
                self._leave(request)
                handle.finish(last)
                self.scheduler.cache.store(request.sequence)
                return
            handle.deliver(Chunk(event.text, event.token, None, depth, logprob))
        if sequence.error is not None:
            self._leave(request, tainted=True)
            handle.fail(sequence.error)

    def _save(self, request: Request) -> None:
        """Copy what is new of the request's row into the prefix cache."""
        copies = self.scheduler.cache.save(request.sequence, self.policy.reusable_tokens(request.sequence))
        if copies is not None:
            assert self.context is not None and self.context.prefix_blocks is not None
            try:
                self.context.prefix_blocks.save(copies.row, copies.first, copies.ids)
            except DeviceMemoryError as error:
                warnings.warn(f"{error}; no prefixes are kept from now on", RuntimeWarning, stacklevel=1)
                self.scheduler.cache.drop()
            if copies.slot is not None:
                assert self.context.snapshots is not None
                self.context.snapshots.save(copies.row, copies.slot)

    def _leave(self, request: Request, tainted: bool = False) -> None:
        """Free a request's row. When that raises, the scheduler still knows the request, and `_run` ends it."""
        row = request.sequence.batch_index
        if row >= 0 and self.context is not None:
            self.context.forget_row(row, tainted)
        with self._changed:
            self.scheduler.remove(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Deliver what a request has, which is not all it asked for."""
        handle = _handle(request)
        if self._dead is not None:
            handle.fail(EngineClosedError(f"the engine has failed ({self._dead}); load it again"))
            return
        try:
            self.scheduler.cache.store(request.sequence)
            request.sequence.end(reason)
            last = Chunk(request.sequence.pieces[-1], None, self._finish(request.sequence))
        except Exception as error:  # the other requests that end with it must not be left waiting
            handle.fail(error)
            return
        handle.finish(last)

    def _use_fewer_rows(self, error: DeviceMemoryError) -> bool:
        """Compute the running requests again, fewer at once; False where that does not help."""
        with self._changed:
            rows = self.scheduler.use_fewer_rows()
        if self.context is not None:
            for row in rows:
                self.context.forget_row(row, tainted=True)  # the step has run in part
        if rows:
            warnings.warn(f"{error}; at most {len(rows) - 1} requests run at once from now on", RuntimeWarning, stacklevel=1)
        return bool(rows)

    def _fail(self, error: Exception) -> None:
        """End all running requests: a copy that the step was to make may be missing in the row of any of them."""
        self._failures += 1
        _log.error("a step failed; %d answers end", len(self.scheduler.running), exc_info=error)
        for request in [*self.scheduler.running]:
            self._leave(request, tainted=True)
            _handle(request).fail(error)
        if self._failures >= _MAX_FAILURES:
            raise error

    def _die(self, error: BaseException) -> None:
        with self._changed:
            self._dead = error


def _handle(request: Request) -> GenerationHandle:
    return cast(Submitted, request).handle  # the loop is given no other requests
