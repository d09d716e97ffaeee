"""Memory is freed in the order of a stream, so not while that is captured: the free would become part of the graph, or fail.

Memory goes whenever Python drops an object, in any thread, also in the one that captures: so who drops it never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Closes(Protocol):
    def close(self) -> None:
        """Give the memory back, in stream order."""


class DeferredFrees:
    """Buffers that nobody needs, until ``lock``, an RLock that guards their stream, is free and nobody captures."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._capturing = lock, False
        self._dropped: deque[Closes] = deque()

    def drop(self, buffer: Closes) -> None:
        """Free ``buffer`` now or later; never waits."""
        self._dropped.append(buffer)
        if self._lock.acquire(blocking=False):
            try:
                self.free()
            finally:
                self._lock.release()

    def free(self) -> None:
        """Those that were dropped so far; for whoever has the lock."""
        while self._dropped and not self._capturing:
            self._dropped.popleft().close()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Nothing is freed inside; for whoever has the lock."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False
            self.free()
