"""An arm's process answers calls until it is told to end."""

from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from tide_bench.arms import ARMS
from tide_bench.arms.base import ArmDevice
from tide_bench.arms.process import ArmError, ArmProcess, _serve


class Moody:
    """Fails when no tokens are requested."""

    def generate(self, new_tokens: int) -> int:
        if not new_tokens:
            raise ValueError("no tokens\nasked for")
        return new_tokens


def _twice(arm: Moody, tokens: int) -> int:
    return 2 * arm.generate(tokens)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """The other end of an arm that serves in a thread."""
    monkeypatch.setitem(ARMS, "moody", lambda folder, device: Moody())
    ours, theirs = Pipe()
    thread = Thread(target=_serve, args=(theirs, "moody", Path()))
    thread.start()
    assert ours.recv()[0] is None  # loaded
    yield ours
    ours.send(None)
    thread.join(10)
    assert not thread.is_alive()


def test_a_call_that_fails_leaves_the_arm_for_the_next(pipe: Connection) -> None:
    """HF's way to draft that a model does not have would take HF eager along, whose process it shares."""
    pipe.send(("generate", (0,), {}))
    assert pipe.recv()[:2] == ("ValueError: no tokens", None)
    pipe.send(("generate", (), {"new_tokens": 3}))
    assert pipe.recv()[:2] == (None, 3)


def test_a_function_is_applied_where_the_arm_is(pipe: Connection) -> None:
    """What is measured inside would be measured over the pipe."""
    pipe.send(("__call__", (_twice, 4), {}))
    error, value, peak, _ = pipe.recv()
    assert (error, value) == (None, 8) and peak > 2**20


def test_a_process_that_died_with_a_call_unread_is_an_arm_that_failed() -> None:
    """One arm that ran out of memory would end the whole comparison with a traceback."""
    process = ArmProcess.__new__(ArmProcess)
    process._pipe, theirs = Pipe()
    process._process = SimpleNamespace(join=lambda: None, exitcode=-9)  # type: ignore[assignment]
    process._pipe.send("a call")
    theirs.close()
    with pytest.raises(ArmError, match="exit code -9"):
        process._answer()


def test_an_arm_that_cannot_be_loaded_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's row would have no reason, or the parent wait for an answer."""

    def load(folder: Path, device: ArmDevice) -> Moody:
        raise ImportError("no module named genai")

    monkeypatch.setitem(ARMS, "absent", load)
    ours, theirs = Pipe()
    _serve(theirs, "absent", Path())
    assert ours.recv()[0] == "ImportError: no module named genai"
