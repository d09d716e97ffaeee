"""Freeing of memory while its stream is captured, or while another thread queues work on it."""

from __future__ import annotations

from threading import Event, RLock, Thread

from tide_runtime.backends.device.deferred_frees import DeferredFrees


class Buffer:
    def __init__(self, freed: list[Buffer]) -> None:
        self._freed = freed

    def close(self) -> None:
        self._freed.append(self)


def test_nothing_is_freed_in_a_capture() -> None:
    """Guards against a free inside a capture, which fails and invalidates the capture."""
    freed: list[Buffer] = []
    frees, first, second = DeferredFrees(lock := RLock()), Buffer(freed), Buffer(freed)
    frees.drop(first)
    assert freed == [first]
    with lock, frees.deferred():
        frees.drop(second)  # as the garbage collector does in the capturing thread
        assert freed == [first]
    assert freed == [first, second]


def test_dropping_memory_never_blocks() -> None:
    """Guards against a deadlock: the garbage collector may run in a thread that the lock's owner waits for."""
    freed: list[Buffer] = []
    frees, buffer, held, dropped = DeferredFrees(lock := RLock()), Buffer(freed), Event(), Event()

    def hold() -> None:
        with lock:
            held.set()
            assert dropped.wait(10)

    thread = Thread(target=hold)
    thread.start()
    assert held.wait(10)
    frees.drop(buffer)
    assert not freed
    dropped.set()
    thread.join()
    with lock:
        frees.free()  # as the next allocation does
    assert freed == [buffer]
