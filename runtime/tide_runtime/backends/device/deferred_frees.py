"""Deferral of stream-ordered frees while the stream is captured, where a free would become part of the graph or fail.

Python may delete an object at any time and in any thread, including the capturing one, so `DeferredFrees.drop` never blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class StreamOrderedBuffer(Protocol):
    def close(self) -> None:
        """Free the memory when the work that was queued before is done."""


class DeferredFrees:
    """Queue of unreferenced buffers, freed when ``lock``, the RLock of their stream, is available and no capture is running.

    ``capturing``: whether one is running, as `deferred` was told.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.capturing = False
        self._dropped: deque[StreamOrderedBuffer] = deque()

    def drop(self, buffer: StreamOrderedBuffer) -> None:
        """Free ``buffer`` now or later, without waiting for the lock."""
        self._dropped.append(buffer)
        if self._lock.acquire(blocking=False):
            try:
                self.free()
            finally:
                self._lock.release()

    def free(self) -> None:
        """Free the dropped buffers, unless a capture is running. The caller holds the lock."""
        while self._dropped and not self.capturing:
            self._dropped.popleft().close()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Free nothing inside the context. The caller holds the lock."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False
            self.free()
