"""Callers of a soak: threads and asyncio tasks that take requests from one list."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any

from tide_runtime import Engine
from tide_runtime.errors import QueueFullError

from benchmarks.serving.soak_plan import PoolText, SoakRequest
from benchmarks.serving.soak_tally import Tally

ANSWER_S = 120.0  # without an answer for so long, a request is lost
_REFUSED_S = 0.002  # until a caller tries again


class Callers:
    """``threads`` threads and ``tasks`` asyncio tasks, on engines by policy, that send requests for ``texts``."""

    def __init__(
        self, engines: Mapping[str, Engine], texts: Sequence[PoolText], tally: Tally, threads: int = 32, tasks: int = 32
    ) -> None:
        self._engines, self._texts, self._tally = engines, texts, tally
        self._threads, self._tasks = threads, tasks

    def send(self, requests: Sequence[SoakRequest]) -> int:
        """Send all of ``requests``; returns how many are lost: without result or error when none has come for `ANSWER_S`."""
        waiting, lock, before = iter(requests), threading.Lock(), self._tally.answered

        def take() -> Iterator[SoakRequest]:
            while True:
                with lock:
                    request = next(waiting, None)
                if request is None:
                    return
                yield request

        running = [threading.Thread(target=self._call, args=(take(),), daemon=True) for _ in range(self._threads)]
        running.append(threading.Thread(target=asyncio.run, args=(self._call_from_tasks(take),), daemon=True))
        for thread in running:
            thread.start()
        answered, since = before, monotonic()
        while any(thread.is_alive() for thread in running) and monotonic() - since < ANSWER_S:
            time.sleep(0.05)
            if self._tally.answered != answered:
                answered, since = self._tally.answered, monotonic()
        return len(requests) - (self._tally.answered - before)

    def _call(self, requests: Iterator[SoakRequest]) -> None:
        for request in requests:
            try:
                while (handle := self._submitted(request)) is None:
                    time.sleep(_REFUSED_S)
                chunks = self._streamed(handle, request) if request.streamed else None
                self._tally.note(request, handle.result(timeout=ANSWER_S), chunks)
            except Exception as error:  # whatever it is: a caller that dies would lose its later requests
                self._tally.note_error(request, error)

    async def _call_from_tasks(self, take: Any) -> None:
        await asyncio.gather(*(self._call_from_task(take()) for _ in range(self._tasks)))

    async def _call_from_task(self, requests: Iterator[SoakRequest]) -> None:
        for request in requests:
            try:
                while (handle := self._submitted(request)) is None:
                    await asyncio.sleep(_REFUSED_S)
                chunks = await self._streamed_async(handle, request) if request.streamed else None
                self._tally.note(request, await handle, chunks)
            except Exception as error:  # as above
                self._tally.note_error(request, error)

    def _submitted(self, request: SoakRequest) -> Any:
        """The request's handle; None when the queue is full."""
        text = self._texts[request.text]
        try:
            return self._engines[request.policy].submit(
                list(text.prompt),
                request.params(text),
                priority=request.priority,
                timeout=request.timeout,
                streamed=request.streamed,
            )
        except QueueFullError:
            self._tally.note_refused()
            return None

    @staticmethod
    def _streamed(handle: Any, request: SoakRequest) -> list[int]:
        if request.cancel_after == 0:
            handle.cancel()
        chunks = []
        for chunk in handle:
            chunks += [] if chunk.token_id is None else [chunk.token_id]
            if len(chunks) == request.cancel_after:
                handle.cancel()
        return chunks

    @staticmethod
    async def _streamed_async(handle: Any, request: SoakRequest) -> list[int]:
        if request.cancel_after == 0:
            handle.cancel()
        chunks = []
        async for chunk in handle:
            chunks += [] if chunk.token_id is None else [chunk.token_id]
            if len(chunks) == request.cancel_after:
                handle.cancel()
        return chunks
