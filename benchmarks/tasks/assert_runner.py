"""Runs the asserts of ``asserts.json`` on ``solution.py``, both in the current folder; `code_check` starts it as a script.

After each assert a 1 (passed) or 0 is appended to the file ``passed``, so that the time limit costs only those that come later.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys

MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20


def limit(seconds: int) -> None:
    """Limit this process, and what it starts, in processor time, memory and the size of files."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))


def passes(statements: str, names: dict[str, object]) -> bool:
    try:
        exec(statements, names)
    except BaseException:  # the code under test may raise anything, SystemExit as well
        return False
    return True


def main() -> None:
    limit(int(sys.argv[1]))
    with open("asserts.json", encoding="utf-8") as file:
        asserts = json.load(file)
    sys.path.insert(0, os.getcwd())
    names = vars(importlib.import_module("solution"))
    for statements in asserts:
        outcome = passes(statements, names)
        with open("passed", "a") as file:
            file.write("1" if outcome else "0")


if __name__ == "__main__":
    main()
