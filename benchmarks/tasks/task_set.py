"""Tasks of eight kinds of work, read from one JSON file a kind: what the user says, and how the replies are checked.

    {"kind": "chat", "max_new_tokens": 128, "system": "optional",
     "tasks": [{"id": "chat-1", "turns": ["the user's message", ...], "check": {"type": "max_words", "words": 60}}, ...]}

All texts were written for this repository. `check_fields` says which checks there are, and how long texts are written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tasks.check_fields import expect_fields, read_check, text, whole

PROMPTS = Path(__file__).resolve().parent / "prompts"
SECOND_PROMPTS = PROMPTS.with_name("second_prompts")


@dataclass(frozen=True)
class Task:
    """A conversation: the messages of the user, between which the model replies, and the check of its replies, as
    `read_check` returns it."""

    id: str
    turns: tuple[str, ...]
    check: Mapping[str, Any]


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
    """The kinds of a folder of JSON files, in the order of their names.

    Raises ValueError for a folder without JSON files, for a file that is not as described above, and for ids that occur twice.
    """
    kinds = [_read_file(path) for path in sorted(folder.glob("*.json"))]
    if not kinds:
        raise ValueError(f"{folder} holds no JSON files; give the folder of the task files")
    if twice := _twice(task.id for kind in kinds for task in kind.tasks):
        raise ValueError(f"ids of tasks in {folder} occur twice: {', '.join(twice)}")
    return kinds


def _read_file(path: Path) -> TaskKind:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        expect_fields(found, {"kind", "max_new_tokens", "tasks"}, {"system"})
        if found["kind"] != path.stem:
            raise ValueError(f"its kind is {found['kind']!r}; a file is named for its kind")
        return TaskKind(
            kind=found["kind"],
            max_new_tokens=whole(found["max_new_tokens"]),
            tasks=tuple(_read_task(task, number) for number, task in enumerate(_filled_list(found, "tasks"), 1)),
            system=text(found["system"]) if "system" in found else None,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_task(found: Any, number: int) -> Task:
    try:
        expect_fields(found, {"id", "turns", "check"})
        turns = tuple(text(turn) for turn in _filled_list(found, "turns"))
        return Task(text(found["id"]), turns, read_check(found["check"], len(turns)))
    except ValueError as error:
        raise ValueError(f"task {number}: {error}") from error


def _filled_list(found: Mapping[str, Any], field: str) -> list[Any]:
    entries = found[field]
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"expected a list of at least one in {field}, got {entries!r}")
    return entries


def _twice(ids: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(ids).items() if count > 1]
