"""`tide-export` as a process of its own, which verifies its bundle behind the first answers of the command that needed it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import IO

from tide_runtime.cli.errors import report
from tide_runtime.errors import OutputError, VerificationError

_FAILED = "a bundle differs from its model, as its export says above: it is deleted, and no answer that it gave can be relied on"


class Verifications:
    """Exporters whose bundles are in use already; those that still run are stopped at the end of the context, unless it ends in
    an error: they then finish by themselves, and the next command finds the bundle."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._stopped = False

    def __enter__(self) -> Verifications:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stopped = True
        running = [] if isinstance(error, Exception) else [*self._running]
        for process in running:
            process.send_signal(signal.SIGINT)  # it deletes the bundle
        for process in running:
            process.wait()

    def add(self, process: subprocess.Popen[bytes]) -> None:
        self._running.append(process)

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self._running)

    def finish(self) -> None:
        """Wait for all of them. Raises VerificationError if a bundle has failed."""
        while self._running:
            process = self._running[0]
            process.wait()
            self._running.pop(0)
            if process.returncode and not self._stopped:
                raise VerificationError(_FAILED)

    def end_process_on_failure(self) -> None:
        """End this process with exit code 2 as soon as a bundle has failed, whatever it is doing; returns at once."""

        def watch() -> None:
            try:
                self.finish()
            except VerificationError as error:
                report(error)
                os._exit(error.exit_code)

        threading.Thread(target=watch, name="verification", daemon=True).start()


def run_exporter(arguments: list[str], lock: IO[bytes], verbose: bool = False, verifications: Verifications | None = None) -> int:
    """Run `tide-export` and return its exit code; Ctrl-C and SIGTERM end it first, and then this process.

    The exporter has a session of its own, so that a terminal's Ctrl-C reaches it once, through this process, and it can clean up.

    Args:
        lock: holds as long as the exporter lives, even if this process is killed.
        verifications: gets the exporter when its bundle is in place and only its verification is left, and 0 is returned.
    """
    command = [sys.executable, "-m", "tide_export.cli", *arguments, *([] if verbose else ["--brief"])]
    reader, writer = os.pipe()
    if verifications is not None:
        command += ["--in-place", str(writer)]
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, pass_fds=[lock.fileno(), writer], start_new_session=True
        )
        os.close(writer)
        try:
            if verifications is not None and os.read(reader, 1):  # nothing: it has ended
                verifications.add(process)
                return 0
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(reader)
    if code == -signal.SIGKILL:
        raise OutputError("the export was killed, most likely because the machine has too little memory; see tide-export --help")
    return code if code >= 0 else 128 - code


def step_behind(in_place: int) -> None:
    """Called by the exporter: say so to the process at the other end of the pipe ``in_place``, and give way to it from now on."""
    with suppress(BrokenPipeError):  # it has ended; the next one finds the bundle
        os.write(in_place, b"1")
    os.close(in_place)
    for thread in os.listdir("/proc/self/task"):  # each has a priority of its own, also those of torch
        os.setpriority(os.PRIO_PROCESS, int(thread), 19)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
