"""The generations of one HTTP request: all are submitted, gathered for the event loop, and cancelled when the client leaves."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace

from fastapi import Request
from tide_runtime import Chunk, Generation, GenerationHandle, GenerationParams

from tide_serve.api.service import ClientWatch, ServedModel, out_of_time
from tide_serve.errors import stopping

Indexed = tuple[int, Chunk]


class Generations:
    """The generations of one request, by number.

    A client that hangs up cancels all of them, from the moment when they are submitted.

    Args:
        jobs: token ids and parameters of each generation.
        streamed: give their chunks; otherwise their results only, with less work for each token.

    Raises what `Engine.submit` raises; nothing runs then.
    """

    def __init__(
        self, model: ServedModel, request: Request, jobs: Sequence[tuple[Sequence[int], GenerationParams]], streamed: bool
    ) -> None:
        self._model = model
        self._handles: list[GenerationHandle] = []
        self._has_tokens = False
        try:
            for ids, wanted in jobs:
                params = replace(wanted, adapter=model.adapter)
                self._handles.append(model.engine.submit(ids, params, timeout=model.seconds_left, streamed=streamed))
        except BaseException:
            self.cancel()
            raise
        self._client = ClientWatch(request, self.cancel)

    @property
    def client_left(self) -> bool:
        """Whether the client hung up before everything was generated."""
        return self._client.left

    def cancel(self) -> None:
        """End all that still run; what they have is given as their result."""
        for handle in self._handles:
            handle.cancel()

    def close(self) -> None:
        """Cancel what still runs, and watch the client no more."""
        self._client.close()
        self.cancel()

    async def results(self) -> list[Generation]:
        """All results, in their order. Raises the error of one that failed, and ApiError as `_check` does."""
        try:
            generations = [await handle for handle in self._handles]
        finally:
            self.close()
        for generation in generations:
            self._model.service.generated(generation)
        self._has_tokens = any(generation.token_ids for generation in generations)
        for generation in generations:
            self._check(generation)
        return generations

    async def chunks(self) -> AsyncGenerator[list[Indexed]]:
        """Chunks with the number of their generation, each time all that are there. Raises as `results` does."""
        inbox = _Inbox(self._handles)
        open_generations = len(self._handles)
        try:
            while open_generations:
                arrived = await inbox.all()
                self._has_tokens = self._has_tokens or any(chunk.token_id is not None for _, chunk in arrived)
                for _, chunk in arrived:
                    if chunk.generation is not None:
                        open_generations -= 1
                        self._model.service.generated(chunk.generation)
                        self._check(chunk.generation)
                yield arrived
        finally:
            self.close()

    def _check(self, generation: Generation) -> None:
        """Raise ApiError where the server has stopped, or its time limit was over before any of the generations began."""
        if self.client_left:
            return
        if generation.finish_reason == "cancelled":
            raise stopping()
        if generation.finish_reason == "deadline" and not self._has_tokens:
            raise out_of_time(self._model.config)


class _Inbox:
    """Chunks of several handles, handed from the engine's thread to the event loop with one wake-up for all that are there."""

    def __init__(self, handles: Sequence[GenerationHandle]) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[int, Chunk | BaseException]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._waking = False
        for number, handle in enumerate(handles):
            handle.listen(lambda item, number=number: self._put(number, item))  # type: ignore[misc]

    def _put(self, number: int, item: Chunk | BaseException) -> None:
        """Hands ``item`` over to the event loop; the engine's thread calls it."""
        self._items.append((number, item))
        if not self._waking:
            self._waking = True
            with suppress(RuntimeError):  # the event loop is closed: the tasks that wait are gone
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._waking = False  # before the items are read, so that later ones wake again
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def all(self) -> list[Indexed]:
        """All chunks that have arrived, after a wait for the first one. Raises the error of a generation that failed."""
        while not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        arrived = []
        for _ in range(len(self._items)):
            number, item = self._items.popleft()
            if isinstance(item, BaseException):
                raise item
            arrived.append((number, item))
        return arrived
