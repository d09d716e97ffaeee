"""Several models in one server: loaded at first use within a budget of memory, unloaded when idle or when another needs the room.

One task does all loading and unloading, one after the other and outside the event loop, in the order in which models were first
asked for. It never unloads a model that has an answer in progress. Where only such models could make room, it chooses which of
them have to leave: new requests for those wait, behind the load, so that a busy model cannot keep the others out for ever.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any

from tide_runtime import Engine, TideError
from tide_runtime.errors import QueueFullError

from tide_serve.errors import RETRY_S, ApiError, stopping
from tide_serve.models.pool_metrics import PoolMetrics
from tide_serve.models.registry import ModelRegistry, described, hanging, has_chat_template, log_notes
from tide_serve.models.source import BundleSource, LoadPlan
from tide_serve.request.tools import described_calls

_log = logging.getLogger("tide_serve")


@dataclass(eq=False)
class PooledModel:
    """One name of a pool.

    Args:
        plan: how it was or would be loaded; None: its bundle could not be read yet.
        failure: why its last load failed.

    Attributes:
        engine: None: not loaded.
        users: answers in progress.
        waiting: requests that wait for the engine.
        loading, leaving: it is being loaded; it was chosen to make room.
        last_used: `monotonic` seconds when it was last taken or released.
    """

    name: str
    source: BundleSource
    plan: LoadPlan | None = None
    failure: str | None = None
    engine: Engine | None = field(default=None, init=False)
    users: int = field(default=0, init=False)
    waiting: deque[asyncio.Future[Engine]] = field(default_factory=deque, init=False)
    loading: bool = field(default=False, init=False)
    leaving: bool = field(default=False, init=False)
    last_used: float = field(default=0.0, init=False)

    @property
    def bytes(self) -> int:
        """What its engine takes, or would take."""
        return 0 if self.plan is None else self.plan.bytes

    @property
    def state(self) -> str:
        return "loading" if self.loading else "not loaded" if self.engine is None else "loaded"

    @property
    def waits(self) -> bool:
        """Whether a request still waits for it."""
        return any(not future.done() for future in self.waiting)

    def take(self) -> Engine | None:
        if self.engine is None or self.leaving or not self.engine.healthy:
            return None
        self.users = self.users + 1
        self.last_used = monotonic()
        return self.engine

    def answer_waiting(self) -> None:
        """Give the engine to the requests that wait, if it takes any."""
        while self.waiting:
            if self.waiting[0].done():  # its time is over, or its client has left
                self.waiting.popleft()
            elif (engine := self.take()) is not None:
                self.waiting.popleft().set_result(engine)
            else:
                return

    def refuse_waiting(self, error: Exception) -> None:
        while self.waiting:
            if not (future := self.waiting.popleft()).done():
                future.set_exception(error)


class ModelPool(ModelRegistry):
    """Models that share ``memory`` bytes.

    Args:
        models: known so far; the first one is shown.
        idle_unload: seconds without a request after which a model is unloaded; None: only for another one's room.
    """

    def __init__(self, models: Sequence[PooledModel], memory: int, idle_unload: float | None = None) -> None:
        self._models = {model.name: model for model in models}
        self.names = tuple(self._models)
        self.only = len(self._models) == 1
        self._memory, self._idle_unload = memory, idle_unload
        self._queue: deque[PooledModel] = deque()  # to be loaded
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._closed = False
        self._metrics = PoolMetrics()

    # --- requests

    def take(self, name: str) -> Engine | None:
        return self._models[name].take()

    def wait(self, name: str) -> asyncio.Future[Engine]:
        model = self._models[name]
        future = asyncio.get_running_loop().create_future()
        if self._closed:
            future.set_exception(stopping())
            return future
        if sum(not other.done() for other in model.waiting) >= model.source.options.max_queue:
            raise QueueFullError(f"{len(model.waiting)} requests wait for {name} to be loaded; send this one again later")
        model.waiting.append(future)
        future.add_done_callback(lambda _: self._news.set())
        if model not in self._queue:
            self._queue.append(model)
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = self._loop.create_task(self._work(), context=Context())  # it logs for no request
        self._news.set()
        return future

    def release(self, name: str) -> None:
        model = self._models[name]
        model.users = model.users - 1
        model.last_used = monotonic()
        self._news.set()

    # --- the task that loads and unloads

    async def _work(self) -> None:
        while not self._closed:
            if self._queue:
                model = self._queue[0]
                try:
                    await self._load(model)
                except Exception as error:
                    self._fail(model, error)
                self._queue.popleft()
                if model.waits and not self._closed:  # came while it failed, or for an engine that has failed since
                    self._queue.append(model)
            else:
                try:
                    await self._unload_idle()
                except Exception as error:  # the models that are asked for later are still to be loaded
                    _log.error("an idle model cannot be unloaded", exc_info=error)

    async def _load(self, model: PooledModel) -> None:
        """Load ``model`` for the requests that wait for it. Raises what loading raises."""
        while model.waits and model.engine is not None and not model.engine.healthy:  # it has failed: load it again
            if not model.users:
                await self._unload(model)
            else:
                await self._change()
        model.answer_waiting()
        if not model.waits:
            return
        model.loading = True
        began = perf_counter()
        try:
            if (plan := await self._make_room(model)) is None:
                return
            _log.info("loads model %s", model.name)
            model.engine = await asyncio.to_thread(model.source.load, plan)
            model.failure = None
            model.last_used = monotonic()
        finally:
            model.loading = False
        if model.engine.backend.private_weights:
            reason = model.engine.backend.private_weights
            _log.warning("the weights of %s are packed in this process's own memory: %s", model.name, reason)
        log_notes(model.name, model.engine)
        if self._closed:  # meanwhile, so `close` has not seen the engine
            model.engine.close(abort=True)
        seconds = perf_counter() - began
        _log.info("model %s is loaded, after %.1f s", model.name, seconds)
        self._metrics.loaded(model.name, model.bytes, seconds)
        model.answer_waiting()

    def _fail(self, model: PooledModel, error: Exception) -> None:
        if not isinstance(error, TideError):
            _log.error("model %s cannot be loaded", model.name, exc_info=error)
        model.failure = str(error) if isinstance(error, TideError) else "it failed to load; the server's log tells the reason"
        self._metrics.failed(model.name)
        model.refuse_waiting(unloadable(model.name, model.failure))

    async def _make_room(self, model: PooledModel) -> LoadPlan | None:
        """Unload others until ``model`` fits. None, and nothing has to leave, once no request waits for it any more."""
        try:
            while model.waits:
                plan = model.plan = await asyncio.to_thread(model.source.verified)  # its files may change during a long wait
                leaving = self._to_leave(model.bytes)
                for other in self._models.values():
                    other.leaving = other in leaving
                    other.answer_waiting()
                if all(not other.users for other in leaving):
                    for other in leaving:
                        await self._unload(other)
                    return plan
                await self._change()
            return None
        finally:
            for other in self._models.values():
                other.leaving = False
                other.answer_waiting()

    def _to_leave(self, needed: int) -> list[PooledModel]:
        """The models that have to leave for ``needed`` bytes: idle ones first, of those the least recently used."""
        loaded = sorted((m for m in self._models.values() if m.engine is not None), key=lambda m: (m.users > 0, m.last_used))
        excess = sum(m.bytes for m in loaded) + needed - self._memory
        leaving = []
        for model in loaded:
            if excess > 0:
                leaving.append(model)
                excess -= model.bytes
        return leaving

    async def _unload(self, model: PooledModel) -> None:
        """Close the engine of ``model``, which has no answer in progress, and free its memory."""
        engine = model.engine
        model.engine = None
        if engine is None:
            return
        self._metrics.unloaded(model.name, engine)
        closing = [engine]
        del engine
        await asyncio.to_thread(_free, closing)

    async def _unload_idle(self) -> None:
        """Unload a model whose time is over, or wait until there is one, or other work."""
        idle = min(
            (m for m in self._models.values() if m.engine is not None and not m.users), key=lambda m: m.last_used, default=None
        )
        if idle is None or self._idle_unload is None:
            await self._change()
        elif (left := idle.last_used + self._idle_unload - monotonic()) > 0:
            await self._change(left)
        else:
            await self._unload(idle)

    async def _change(self, timeout: float | None = None) -> None:
        """Wait until a request has come, ended or given up, for ``timeout`` seconds at most."""
        self._news.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout)

    # --- the server

    def described(self, name: str) -> dict[str, Any]:
        model = self._models[name]
        known = described(model.plan.bundle.manifest) if model.plan is not None else {"max_model_len": None}
        fields = {**known, "state": model.state, "bytes": model.bytes or None}
        fields |= described_calls(model.engine) if model.engine is not None else {}
        return fields if model.failure is None else {**fields, "error": model.failure}

    def summary(self) -> str:
        broken = "".join(f"\n  {m.name} cannot be loaded: {m.failure}" for m in self._models.values() if m.failure is not None)
        sound = ", ".join(m.name for m in self._models.values() if m.failure is None)
        return f"{sound}, loaded at first use within {self._memory / 2**30:.1f} GiB{broken}"

    def chats(self, name: str) -> bool:
        plan = self._models[name].plan
        return plan is not None and has_chat_template(plan.bundle.manifest)

    def failure(self) -> str | None:
        if self._closed:
            return "the server's engines are closed"
        engines = {model.name: model.engine for model in self._models.values()}
        reasons = ((name, hanging(engine)) for name, engine in engines.items() if engine is not None)
        return next((f"{name}: {reason}" for name, reason in reasons if reason is not None), None)

    def obstacle(self) -> str | None:
        return self.failure()

    def metrics(self) -> str:
        return self._metrics.text({name: model.engine for name, model in self._models.items() if model.engine is not None})

    def close(self, abort: bool = False) -> None:
        """Close all engines, and refuse the requests that wait for one. From any thread."""
        self._closed = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed, and so are its tasks
                self._loop.call_soon_threadsafe(self._end)
        for model in self._models.values():
            if (engine := model.engine) is not None:
                engine.close(abort)

    def _end(self) -> None:
        for model in self._models.values():
            model.refuse_waiting(stopping())
        self._news.set()


def unloadable(name: str, reason: str) -> ApiError:
    """The error of a request for a model that cannot be loaded now; the next one tries again."""
    return ApiError(503, f"the model {name!r} cannot be loaded: {reason}", "model", "model_not_loaded", RETRY_S)


def _free(closing: list[Engine]) -> None:
    """Close the engine in the list, which has the last reference to it."""
    closing.pop().close(abort=True)
    gc.collect()  # its sessions refer to each other
