"""Runs the code of a reply against asserts, in a process of its own with limits on time, memory and files.

That guards against loops and accidents, not against malice: the code has the benchmark's own rights.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

RUNNER = Path(__file__).with_name("assert_runner.py")
SECONDS = 5
PYTHON_FENCE = re.compile(r"```[ \t]*(?:python3?|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
ANY_FENCE = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def first_python_block(reply: str) -> str:
    """The first fenced block that is marked as Python, else the first fenced one, else the whole reply. A reply that was cut off
    has no closing fence; its block goes on to the end."""
    found = PYTHON_FENCE.search(reply) or ANY_FENCE.search(reply)
    return found.group(1) if found else reply


def passing_share(reply: str, asserts: Sequence[str], seconds: int = SECONDS) -> float:
    """Share of the asserts that pass on the code of a reply; those that were not reached when the time was up do not.

    An assert is any statements; they see what the code defined. Code that raises when it is imported passes none.
    """
    with tempfile.TemporaryDirectory(prefix="tide-asserts-") as name:
        folder = Path(name)
        (folder / "solution.py").write_text(first_python_block(reply), encoding="utf-8", errors="replace")
        (folder / "asserts.json").write_text(json.dumps(list(asserts)), encoding="utf-8")
        _run(folder, seconds)
        passed = folder / "passed"
        return passed.read_text().count("1") / len(asserts) if passed.exists() else 0.0


def _run(folder: Path, seconds: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-I", str(RUNNER), str(seconds)],
        cwd=folder,
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the group: what the code started itself ends with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
