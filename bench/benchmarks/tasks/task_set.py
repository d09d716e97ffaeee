"""Tasks of ten kinds of work, read from one JSON file a kind: what the user says, and what a right answer contains.

    {"kind": "chat", "max_new_tokens": 128, "system": "optional",
     "tasks": [{"id": "chat-1", "turns": ["the user's message", ...], "expects": ["a regular expression", ...]}, ...]}

A text is a string or a list of pieces that are concatenated. A task is solved when every expression of ``expects`` matches in the
last reply, without regard to case. A task without ``expects`` is not judged. All texts were written for this repository.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).resolve().parent / "prompts"


@dataclass(frozen=True)
class Task:
    """A conversation: the messages of the user, between which the model replies."""

    id: str
    turns: tuple[str, ...]
    expects: tuple[str, ...] = ()

    def solved_by(self, reply: str) -> bool | None:
        """Whether the last ``reply`` has all that a right answer contains; None: the task does not say."""
        return all(re.search(one, reply, re.IGNORECASE | re.DOTALL) for one in self.expects) if self.expects else None


@dataclass(frozen=True)
class TaskKind:
    """Tasks of one kind of work.

    Args:
        max_new_tokens: limit of every reply in tokens, also where a task has several turns.
        system: the system prompt of all its tasks; None: there is none.
    """

    kind: str
    max_new_tokens: int
    tasks: tuple[Task, ...]
    system: str | None = None


def load_tasks(folder: Path = PROMPTS) -> list[TaskKind]:
    """The kinds of a folder of JSON files, in the order of their names. Raises ValueError for a folder without any."""
    kinds = [_kind(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]
    if not kinds:
        raise ValueError(f"{folder} holds no JSON files; give the folder of the task files")
    return kinds


def _kind(content: dict[str, Any]) -> TaskKind:
    tasks = tuple(
        Task(task["id"], tuple(_text(turn) for turn in task["turns"]), tuple(task.get("expects", ())))
        for task in content["tasks"]
    )
    system = _text(content["system"]) if "system" in content else None
    return TaskKind(content["kind"], content["max_new_tokens"], tasks, system)


def _text(stored: str | list[str]) -> str:
    return stored if isinstance(stored, str) else "".join(stored)
