"""An arm in a process of its own, called over a pipe: while another arm is timed, this one sleeps in a read.

Thread pools of different libraries in one process would spin against each other and time nothing but that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tide_bench.arms import ARMS
from tide_bench.arms.base import ArmDevice, Timing
from tide_bench.counters import forget_peak, gpu_bytes, peak_bytes

_TIMEOUT_S = 900  # torch.compile of 24 layers takes a minute or two


class ArmError(Exception):
    """An arm cannot run; the message is the reason, on one line."""


class ArmProcess:
    """The arm ``name`` on the model in ``folder``. Close it to give its memory back.

    ``peak_bytes``: the most memory that its process held during the last call.
    ``gpu_bytes``: what it holds of GPUs after that call: the most so far, as allocators keep what they have. None where it uses
    none, or the driver does not tell.

    Args:
        load: makes the arm from the folder, it must pickle; None: as `ARMS` says for ``name``.
        device: what it runs on; for arms of `ARMS`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        load: Callable[[Path], Any] | None = None,
        device: ArmDevice | None = None,
    ) -> None:
        self.name = name
        self.peak_bytes = 0
        self.gpu_bytes: int | None = None
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, load or name, folder, device), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._answer()
        except ArmError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Timing:
        """Raises ArmError when the arm fails or stops early. ``options``: what the arm takes besides."""
        timing: Timing = self.call("generate", prompts, new_tokens, **options)
        if any(len(row) != new_tokens for row in timing.tokens):
            raise ArmError(f"made {sorted({len(row) for row in timing.tokens})} tokens a row, expected {new_tokens}")
        return timing

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(arm, *args)`` in its process; all of it must pickle."""
        return self.call("__call__", function, *args)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """``arm.method(*args, **options)`` in its process."""
        try:
            self._pipe.send((method, args, options))
        except OSError as error:
            raise ArmError(f"its process is gone ({error})") from error
        return self._answer()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _answer(self) -> Any:
        if not self._pipe.poll(_TIMEOUT_S):
            self._process.kill()
            raise ArmError(f"no answer within {_TIMEOUT_S} s")
        try:
            error, value, self.peak_bytes, self.gpu_bytes = self._pipe.recv()
        except (EOFError, ConnectionError):  # reset: it died with a call unread
            self._process.join()
            raise ArmError(f"its process died with exit code {self._process.exitcode}") from None
        if error is not None:
            raise ArmError(error)
        return value


def _serve(
    pipe: Connection,
    kind: str | Callable[[Path], Any],
    folder: Path,
    device: ArmDevice | None = None,
) -> None:
    """Load the arm, then answer calls. One that fails is answered with the reason; the arm stays for the next."""
    load = (lambda: ARMS[kind](folder, device or ArmDevice())) if isinstance(kind, str) else partial(kind, folder)
    arm = _answer(pipe, load, keep=True)
    while arm is not None and (request := pipe.recv()) is not None:
        method, args, options = request
        call = partial(args[0], arm, *args[1:]) if method == "__call__" else partial(getattr(arm, method), *args, **options)
        _answer(pipe, call)


def _answer(pipe: Connection, call: Callable[[], Any], keep: bool = False) -> Any:
    """Send what ``call`` returns, or ``keep`` it and send that it worked; whatever a library raises becomes the reason."""
    forget_peak()
    try:
        value = call()
        pipe.send((None, None if keep else value, peak_bytes(), gpu_bytes()))
        return value
    except Exception as error:
        pipe.send((f"{type(error).__name__}: {error}".splitlines()[0], None, peak_bytes(), gpu_bytes()))
        return None
