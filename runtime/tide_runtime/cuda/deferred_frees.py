"""Memory is freed in the order of a stream, so not while that is captured: the free would become part of the graph, or fail.

Memory goes whenever Python drops an object, in any thread, also in the one that captures: so who drops it never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Protocol


class Closes(Protocol):
    def close(self) -> None:
        """Give the memory back, in stream order."""


class DeferredFrees:
    """Buffers that nobody needs, until ``lock``, which guards their stream, is free and nobody captures."""

    def __init__(self, lock: RLock) -> None:  # type: ignore[valid-type]  # a function to typeshed of older Pythons
        self._lock, self._capturing = lock, False
        self._dropped: deque[Closes] = deque()

    def drop(self, buffer: Closes) -> None:
        """Free ``buffer`` now or later; never waits."""
        self._dropped.append(buffer)
        if self._lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                self.free()
            finally:
                self._lock.release()  # type: ignore[attr-defined]

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
