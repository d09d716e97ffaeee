"""Servers in processes of their own."""

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def end_of(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, object]]]:
    """The exit code, and the lines of the log."""
    log = process.communicate(timeout=60)[1]
    return process.returncode, [json.loads(line) for line in log.splitlines()]
