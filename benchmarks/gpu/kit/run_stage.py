"""A stage from outside: starts its process, stops cases and stages that take too long, and writes the stage's JSON.

A process that dies, or whose case is stopped, costs that case: another process goes on with the next one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Thread
from typing import IO, Any

from benchmarks.gpu.kit.bare_image import ROOT
from benchmarks.gpu.kit.case import Bench
from benchmarks.gpu.kit.child import LOST
from benchmarks.gpu.kit.journal import FAILED, Journal, Progress, read
from benchmarks.gpu.kit.stage_files import START, StageFiles

_POLL_S, _WRITE_S, _MOST_PROCESSES = 0.25, 5.0, 16
_START_LIMIT_S = 120.0  # imports, and what a stage prepares before its first case


@dataclass
class StageRun:
    """One call's run of a stage, for at most ``limit`` seconds. ``say``: prints a line of progress."""

    files: StageFiles
    bench: Bench
    limit: float
    facts: dict[str, Any]
    say: Callable[[str], None]
    begun: float = field(default_factory=time.monotonic)
    before: float = 0.0  # seconds of earlier calls

    def run(self, earlier: dict[str, Any] | None) -> dict[str, Any]:
        """The stage's result, which is also written. ``earlier``: an incomplete one, to go on with."""
        self.files.begin(earlier)
        self.before, stopped = earlier["seconds"] if earlier is not None else 0.0, None
        for _ in range(_MOST_PROCESSES):
            known = len(read(self.files.journal).results)
            why, is_over = self._process()
            progress = self._blamed(why, is_over)
            if is_over or progress.complete or len(progress.results) == known or START in progress.results:
                stopped = why if is_over else None
                break
        return self._write(progress, stopped)

    def _process(self) -> tuple[str | None, bool]:
        """Run one process; why it ended (None: it was through) and whether the stage's time is over."""
        command = [sys.executable, "-u", "-m", "benchmarks.gpu.kit.child", str(self.files.stage.number)]
        command += ["--journal", str(self.files.journal), "--work", str(self.bench.work), "--arch", self.bench.arch]
        with subprocess.Popen(
            [*command, *(["--dry"] if self.bench.dry else [])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            reader = Thread(target=self._copy_output, args=(process.stdout,), daemon=True)
            reader.start()
            try:
                why, is_over = self._watch(process)
            finally:
                _kill(process)
            reader.join(5)
        return why, is_over

    def _watch(self, process: subprocess.Popen[str]) -> tuple[str | None, bool]:
        case, since, written = None, time.monotonic(), time.monotonic()
        while process.poll() is None:
            if time.monotonic() - self.begun > self.limit:
                return f"stopped after the stage's {self.limit:.0f} s", True
            progress = read(self.files.journal)
            if time.monotonic() - written > _WRITE_S:  # the call itself may be killed
                written = time.monotonic()
                self._write(progress, "the kit itself was stopped")
            if progress.running != case:
                case, since = progress.running, time.monotonic()
            limit = _START_LIMIT_S if case is None else progress.plan[case]["limit"]
            # Limits are for a GPU machine; a dry run may be on any.
            if time.monotonic() - since > limit and not progress.complete and not self.bench.dry:
                return f"stopped after {limit:.0f} s", False
            time.sleep(_POLL_S)
        return (None if process.returncode in (0, LOST) else _death(process.returncode)), False

    def _blamed(self, why: str | None, is_over: bool) -> Progress:
        """The progress, in which the case that was running has failed unless only the time was over."""
        progress = read(self.files.journal)
        if why is not None and not is_over and not progress.complete:
            case = progress.running or START
            Journal(self.files.journal).end({"case": case, "state": FAILED, "reason": why, "log": self.files.log_tail()[-2000:]})
            self.say(f"  {case}: {why}")
        return read(self.files.journal)

    def _copy_output(self, lines: IO[str]) -> None:
        with self.files.log.open("a", encoding="utf-8") as log:
            for line in lines:
                log.write(line)
                log.flush()
                self.say(f"  {line.rstrip()}")

    def _write(self, progress: Progress, stopped: str | None) -> dict[str, Any]:
        stage = self.files.stage
        content = {
            "stage": stage.number,
            "title": stage.title,
            "state": progress.state,
            "complete": progress.complete,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(self.before + time.monotonic() - self.begun, 1),
            "expected_seconds": sum(case["seconds"] for case in progress.plan.values()),
            "stopped": stopped,
            "arch": self.bench.arch,
            "dry": self.bench.dry,
            **self.facts,
            "cases_planned": len(progress.plan),
            "cases": list(progress.results.values()),
            "log": self.files.log_tail(),
        }
        self.files.write(content)
        return content


def _kill(process: subprocess.Popen[str]) -> None:
    """The process and all that it started; compute-sanitizer's programs among them."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _death(code: int) -> str:
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"
