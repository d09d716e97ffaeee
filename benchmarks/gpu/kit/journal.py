"""What a stage's process did so far, as lines of a file: the process may die at any moment, and what it wrote stays.

A line ``{"begin": case}`` comes before a case, its result after it. The parent process makes the stage's JSON of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Result = dict[str, Any]  # case, state, seconds, and figures or the reason
Plan = dict[str, dict[str, float]]  # case → the seconds that it is expected to take, and its limit
PASSED, FAILED, NOT_RUN, PREPARED = "passed", "failed", "not run", "prepared"


class Journal:
    """Appends to ``path``; each line is on disk when a method returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def begin(self, case: str) -> None:
        self._append({"begin": case})

    def end(self, result: Result) -> None:
        self._append({"end": result})

    def planned(self, plan: Plan) -> None:
        self._append({"plan": plan})

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=float) + "\n")  # NumPy's numbers


@dataclass
class Progress:
    """``running``: the case that began and has not ended."""

    plan: Plan = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    running: str | None = None

    @property
    def complete(self) -> bool:
        return bool(self.plan) and self.results.keys() >= self.plan.keys()

    @property
    def state(self) -> str:
        """Of the stage: failed as soon as a case failed, not run where no case could."""
        states = [result["state"] for result in self.results.values()]
        if FAILED in states:
            return FAILED
        if not self.complete:
            return "incomplete"
        return NOT_RUN if set(states) == {NOT_RUN} else PREPARED if PREPARED in states else PASSED


def read(path: Path) -> Progress:
    """What the journal in ``path`` says; a last line that was cut off counts as not written."""
    progress = Progress()
    for line in _lines(path):
        if "plan" in line:
            progress.plan = line["plan"]
        elif "begin" in line:
            progress.running = line["begin"]
        else:
            progress.results[line["end"]["case"]], progress.running = line["end"], None
    return progress


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            return
