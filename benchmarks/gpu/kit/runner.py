"""Runs rows of stages, one process a stage, until a call's time is over; what they find is written as it comes.

kit.jsonl    a line for each case: call, stage, case, state, seconds, and figures or the reason with its traceback
kit.log      everything that the processes print, each line with its stage
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any

from benchmarks.gpu.kit.bare_image import ROOT
from benchmarks.gpu.kit.child import FAILED, LOST
from benchmarks.gpu.kit.plan import Row, Stage

Result = dict[str, Any]
_POLL_S, _LEAST_S, _START_LIMIT_S, _MOST_PROCESSES = 0.2, 5.0, 60.0, 12  # start: imports, and what comes before a first case


class ResultFiles:
    """``folder``: what comes back from the machine, of few files. ``facts``: go into every line."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._facts, self._lock = folder, facts, Lock()
        self.results: list[Result] = []

    def add(self, result: Result) -> None:
        with self._lock:
            self.results.append(result)
            with (self.folder / "kit.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._facts | result) + "\n")

    def log(self, stage: str, line: str) -> None:
        with self._lock, (self.folder / "kit.log").open("a", encoding="utf-8") as file:
            file.write(f"[{stage}] {line}\n")

    def archive(self, work: Path) -> None:
        """One file of logs that stages left in ``work``, and of the above."""
        with tarfile.open(self.folder / "kit-results.tar.xz", "w:xz") as archive:
            for path in [*self.folder.glob("kit.*"), *work.rglob("*.log")]:
                archive.add(path, path.name)


@dataclass
class Call:
    """One call: ``seconds`` at most for all rows. ``given``: what every stage's process gets (arch, work, carried, dry)."""

    files: ResultFiles
    seconds: float
    given: dict[str, Any]
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.begun + self.seconds - time.monotonic()

    def run(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if self.left < _LEAST_S:
                for stage in row:
                    self.files.add({"stage": stage.name, "case": "start", "state": "left", "reason": "the call's time was over"})
                continue
            print(f"{time.monotonic() - self.begun:6.1f} s  {', '.join(stage.name for stage in row)}", flush=True)
            threads = [Thread(target=StageRun(stage, self).run) for stage in row]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


@dataclass
class StageRun:
    """A stage from outside: a process that dies, or whose case is stopped, costs that case; another one goes on with the next."""

    stage: Stage
    call: Call
    done: list[str] = field(default_factory=list)
    running: str | None = None
    since: float = 0.0
    last_lines: list[str] = field(default_factory=list)

    def run(self) -> None:
        begun = time.monotonic()
        end = begun + (min(self.stage.limit, self.call.left) if not self.call.given["dry"] else self.call.left)
        for _ in range(_MOST_PROCESSES):
            why, again = self._process(end)
            if why is not None:
                self._blame(why)
            if not again:
                break
        self._add({"case": "stage", "state": "ended", "seconds": round(time.monotonic() - begun, 1)})

    def _process(self, end: float) -> tuple[str | None, bool]:
        """Run one process; why it ended before it was through, or None, and whether another one should go on."""
        self.running, self.since = None, time.monotonic()
        reading, writing = os.pipe()
        given = self.call.given | dict(module=self.stage.module, argument=self.stage.argument, done=self.done, pipe=writing)
        command = [sys.executable, "-u", "-m", "benchmarks.gpu.kit.child", json.dumps(given)]
        output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        with subprocess.Popen(command, cwd=ROOT, pass_fds=(writing,), process_group=0, **output) as process:
            os.close(writing)
            readers = [
                Thread(target=self._read_results, args=(os.fdopen(reading, encoding="utf-8", errors="replace"),), daemon=True),
                Thread(target=self._copy_output, args=(process.stdout,), daemon=True),
            ]
            for reader in readers:
                reader.start()
            try:
                why, again = self._watch(process, end)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and all that it started: compute-sanitizer's programs among them
                process.wait()
            for reader in readers:
                reader.join(5)
        return why, again

    def _watch(self, process: subprocess.Popen[str], end: float) -> tuple[str | None, bool]:
        while process.poll() is None:
            now = time.monotonic()
            if now > end:
                return "the stage's time was over", False
            limit = _START_LIMIT_S if self.running is None else self.stage.case_limit
            # Limits are for a GPU machine; a dry run may be on any.
            if now - self.since > limit and not self.call.given["dry"]:
                return f"stopped after {limit:.0f} s", self.running is not None
            time.sleep(_POLL_S)
        code = process.returncode
        if code in (0, LOST):
            return None, code == LOST
        return f"the process died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}", self.running is not None

    def _blame(self, why: str) -> None:
        """Write that the case that was running has failed, with what the process printed last."""
        case = self.running or "start"
        self.done.append(case)
        self._add({"case": case, "state": FAILED, "reason": why, "traceback": "\n".join(self.last_lines[-60:])})

    def _read_results(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                with suppress(ValueError):  # a line that was cut off when the process died
                    result = json.loads(line)
                    self.since = time.monotonic()
                    if "begin" in result:
                        self.running = result["begin"]
                    else:
                        self.running = None
                        self.done.append(result["case"])
                        self._add(result)

    def _copy_output(self, lines: IO[str]) -> None:
        for line in lines:
            self.last_lines = [*self.last_lines[-200:], line.rstrip("\n")]
            self.call.files.log(self.stage.name, line.rstrip("\n"))

    def _add(self, result: Result) -> None:
        self.call.files.add({"stage": self.stage.name, **result})
        if result["state"] == FAILED:
            print(f"         {self.stage.name}, {result['case']}: {result['reason'].splitlines()[0][:200]}", flush=True)
