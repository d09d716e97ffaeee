"""What a caller holds of a request: iterate it, await it, wait for its result, or cancel it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from tide_runtime.outputs import Chunk, Generation

_Item = Chunk | BaseException
Result = TypeVar("Result")


class GenerationHandle:
    """One submitted request.

    Iterating (``for`` or ``async for``, once) gives a `Chunk` per token as soon as it is final; leaving the loop early
    cancels the request. `result`, or ``await``, gives the whole `Generation`. Both raise the request's error: NumericsError,
    BundleError, EngineClosedError.

    Args:
        cancel: tells the engine loop that the request is not wanted any more.
        streamed: whether chunks are delivered; otherwise only the result is.
        owner: kept alive until the request has ended.
    """

    def __init__(self, cancel: Callable[[], None], streamed: bool, owner: object = None) -> None:
        self.streamed = streamed
        self._cancel = cancel
        self._owner = owner
        self._result: Future[Generation] = Future()
        self._chunks: SimpleQueue[_Item] = SimpleQueue()
        self._forward: Callable[[_Item], None] = self._chunks.put
        self._lock = threading.Lock()
        self._exhausted = False

    @property
    def done(self) -> bool:
        """Whether the request has ended, with a result or an error."""
        return self._result.done()

    def cancel(self) -> None:
        """End the request after the token in progress; its result has what was generated. Does nothing when it is done."""
        if not self.done:
            self._cancel()

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the whole generation, at most ``timeout`` seconds. Raises TimeoutError, or the request's error."""
        return self._result.result(timeout)

    def listen(self, receiver: Callable[[Chunk | BaseException], None]) -> None:
        """Give every chunk to ``receiver``, those that are there at once, later ones in the engine's thread as they come.

        An error comes in place of the last chunk. For servers that gather the chunks of several requests; takes the place of
        iterating. ``receiver`` must neither block nor raise.
        """
        with self._lock:
            self._forward = receiver
            while not self._chunks.empty():
                receiver(self._chunks.get_nowait())

    def __iter__(self) -> Iterator[Chunk]:
        try:
            while not self._exhausted:
                chunk = _chunk(self._chunks.get())
                self._exhausted = chunk.generation is not None
                yield chunk
        finally:
            self._exhausted = True
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        loop = asyncio.get_running_loop()
        chunks = asyncio.Queue[_Item]()

        def forward(item: _Item) -> None:
            with suppress(RuntimeError):  # the event loop is closed: its tasks are gone
                loop.call_soon_threadsafe(chunks.put_nowait, item)

        self.listen(forward)
        try:
            while not self._exhausted:
                chunk = _chunk(await chunks.get())
                self._exhausted = chunk.generation is not None
                yield chunk
        finally:
            self._exhausted = True
            self.cancel()

    def __await__(self) -> Generator[Any, None, Generation]:
        return self._wait().__await__()

    async def _wait(self) -> Generation:
        try:
            return await asyncio.shield(asyncio.wrap_future(self._result))
        except asyncio.CancelledError:
            self.cancel()
            raise

    # --- the engine loop's side

    def deliver(self, chunk: Chunk) -> None:
        """Hand over one token."""
        if self.streamed:
            self._put(chunk)

    def finish(self, last: Chunk) -> None:
        """Hand over the last token and the result."""
        assert last.generation is not None
        self._owner = None  # or an engine that is dropped would live as long as what its thread keeps of the request
        self._result.set_result(last.generation)
        self._put(last)

    def fail(self, error: BaseException) -> None:
        """End the request with ``error``."""
        self._owner = None
        self._result.set_exception(error)
        self._put(error)

    def _put(self, item: _Item) -> None:
        with self._lock:
            self._forward(item)


class ResultHandle(Generic[Result]):
    """A request that is wanted for something else than its text: await it, or wait for its `result`; both raise its error.

    Args:
        make_result: what the request was for, once it is done.
    """

    def __init__(self, handle: GenerationHandle, make_result: Callable[[], Result]) -> None:
        self._handle, self._make_result = handle, make_result

    def result(self, timeout: float | None = None) -> Result:
        """Wait at most ``timeout`` seconds. Raises TimeoutError, and EngineClosedError where it was cancelled."""
        self._handle.result(timeout)
        return self._make_result()

    def cancel(self) -> None:
        self._handle.cancel()

    def __await__(self) -> Generator[Any, None, Result]:
        yield from self._handle.__await__()
        return self._make_result()


def _chunk(item: _Item) -> Chunk:
    if isinstance(item, BaseException):
        raise item
    return item
