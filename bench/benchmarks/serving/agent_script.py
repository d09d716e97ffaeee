"""The session of a scripted coding agent: 20 turns with tools, JSON and code edits, made of this repository's own texts.

A turn is what a coding agent sends its model: a task, the part of a file that a call was answered with, an edit to write, the
tests' output. Nothing of it depends on what the model wrote, so every server gets the same turns.

The agent describes its tools in the system message, and calls are JSON of a schema. Fields for tools would not compare: the
model's template shows none, and llama.cpp's server lets a required call begin with any text, of which this model writes no end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_ROOT = Path(__file__).resolve().parents[3]
_RULES = "CONTRIBUTING.md"
_RULES_TOKENS = 300
_EXCERPT_TOKENS = 500


@dataclass(frozen=True)
class Turn:
    """``text``: what the agent sends; ``max_tokens``: of the answer; ``schema``: of the call that it is to be, None: text."""

    text: str
    max_tokens: int
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Task:
    """An edit of the file ``path``, whose lines from the one that begins with ``start`` on are read."""

    path: str
    start: str
    wanted: str
    edit: str


_TASKS = (
    _Task(
        "runtime/tide_runtime/scheduling/prefix_tree.py",
        "class PrefixTree",
        "Texts of different salts must stay apart in the prefix tree.",
        "Write `match` again so that it raises ValueError for an empty list of tokens.",
    ),
    _Task("docs/api.md", "# In Python", "The page about the Python API is out of date.", "Write its code example again, async."),
    _Task(
        "runtime/tide_serve/config.py",
        "def api_keys",
        "Keys that are too short must be refused.",
        "Write `api_keys` again so that it refuses keys of fewer than 16 characters.",
    ),
    _Task(
        "bench/benchmarks/serving/load.py",
        "def closed_loop",
        "The closed loop needs a time limit.",
        "Write `closed_loop` again with an argument `seconds` after which no request is sent.",
    ),
    _Task(
        "bench/tide_bench/report.py",
        "class Report",
        "A report must be readable while a run goes on.",
        "Write the method `add` again so that it also prints the figure.",
    ),
)
_TESTS = """The edit was written to {path}. The tests say:

{folder} ....................F [100%]
FAILED {folder}: AssertionError: assert 3 == 4
1 failed, 20 passed in 3.4{number} s

Report what is to be done next."""
_SYSTEM = """You are a coding agent in a repository. You read files with tools before you edit them, you write whole functions,
and you report what you did. Your tools, which you call with JSON:

{tools}

The rules of the repository:

{rules}"""


def _object(**fields: Sequence[str]) -> dict[str, Any]:
    """The schema of an object whose fields are one of some texts each."""
    properties = {name: {"type": "string", "enum": list(values)} for name, values in fields.items()}
    return {"type": "object", "properties": properties, "required": list(fields), "additionalProperties": False}


# Arguments are choices, so that a call is as long for every model.
_PATHS = [task.path for task in _TASKS]
READ = _object(tool=("read_file",), path=_PATHS, part=("beginning", "middle", "end"))
REPORT = _object(
    tool=("report",), status=("done", "failed"), file=_PATHS, next=("read_again", "edit_again", "run_tests", "ask_user")
)


@dataclass(frozen=True)
class Session:
    """What an agent sends: ``system``, and ``turns`` one after the other."""

    system: str
    turns: tuple[Turn, ...]


def session(tokenizer: Tokenizer) -> Session:
    """The whole session, its excerpts cut by ``tokenizer``. Raises ValueError where a text of the repository has moved."""
    rules = _excerpt(tokenizer, _RULES, "## Where things are", _RULES_TOKENS)
    turns = tuple(turn for number, task in enumerate(_TASKS, 1) for turn in _turns(tokenizer, number, task))
    return Session(_SYSTEM.format(rules=rules, tools="\n".join(json.dumps(tool) for tool in (READ, REPORT))), turns)


def _turns(tokenizer: Tokenizer, number: int, task: _Task) -> tuple[Turn, ...]:
    excerpt = _excerpt(tokenizer, task.path, task.start, _EXCERPT_TOKENS)
    tests = _TESTS.format(path=task.path, folder=Path("tests", Path(task.path).parent.name).as_posix(), number=number)
    return (
        Turn(f"Task {number}: {task.wanted} Read {task.path} first.", 96, READ),
        Turn(f"The tool answers:\n{excerpt}", 64),
        Turn(f"{task.edit} Answer with the code and nothing else.", 192),
        Turn(tests, 96, REPORT),
    )


def _excerpt(tokenizer: Tokenizer, path: str, start: str, tokens: int) -> str:
    """Whole lines of a file, from the one that begins with ``start`` on: as many as fit into ``tokens``."""
    lines = (_ROOT / path).read_text(encoding="utf-8").splitlines(keepends=True)
    first = next((place for place, line in enumerate(lines) if line.startswith(start)), None)
    if first is None:
        raise ValueError(f"{path} has no line that begins with {start!r}; name one that it has")
    kept = list[str]()
    count = 0
    for line in lines[first:]:
        count += len(tokenizer.encode(line, add_special_tokens=False).ids)
        if count > tokens:
            break
        kept.append(line)
    return "".join(kept)
