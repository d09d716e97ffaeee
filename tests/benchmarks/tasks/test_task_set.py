"""The task files of benchmarks/tasks, and what the loader refuses."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tasks.checks import occurs
from benchmarks.tasks.task_set import PROMPTS, SECOND_PROMPTS, Task, TaskKind, load_tasks

MAX_NEW_TOKENS = {
    "arithmetic": 128,
    "chat": 128,
    "code_rewrite": 384,
    "json_extract": 160,
    "retrieval": 96,
    "summary": 128,
    "translation": 160,
    "turns": 96,
}
WORDS = {
    "arithmetic": (15, 60),
    "chat": (15, 60),
    "code_rewrite": (50, 150),
    "json_extract": (75, 180),
    "retrieval": (180, 320),
    "summary": (180, 370),
    "translation": (40, 100),
    "turns": (4, 40),
}
FOLDERS = {PROMPTS: ("", 10), SECOND_PROMPTS: ("second-", 5)}  # what ids have before the number, tasks of a kind
FILE = {
    "kind": "chat",
    "max_new_tokens": 8,
    "tasks": [{"id": "chat-1", "turns": ["Hi?"], "check": {"type": "max_words", "words": 5}}],
}


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(scope="module")
def kinds(folder: Path) -> list[TaskKind]:
    return load_tasks(folder)


def all_tasks(kinds: list[TaskKind]) -> list[Task]:
    return [task for kind in kinds for task in kind.tasks]


def load_one(folder: Path, document: Any, name: str = "chat.json") -> list[TaskKind]:
    (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return load_tasks(folder)


def test_eight_kinds_of_equally_many_tasks(kinds: list[TaskKind], folder: Path) -> None:
    """A kind would be missing from the tables, or would weigh less than the others in their means."""
    _, count = FOLDERS[folder]
    assert {kind.kind: (len(kind.tasks), kind.max_new_tokens) for kind in kinds} == {
        name: (count, tokens) for name, tokens in MAX_NEW_TOKENS.items()
    }
    assert {kind.kind for kind in kinds if kind.system} == {"json_extract", "retrieval"}


def test_the_folders_differ_in_nothing_but_their_tasks() -> None:
    """Figures of the second set would differ by a limit or a system prompt, not by its texts."""
    first, second = ([(kind.kind, kind.max_new_tokens, kind.system) for kind in load_tasks(folder)] for folder in FOLDERS)
    assert first == second


def test_ids_name_their_kind_and_number(kinds: list[TaskKind], folder: Path) -> None:
    """A row of results could not be traced to its prompt."""
    before, count = FOLDERS[folder]
    assert [task.id for task in all_tasks(kinds)] == [f"{kind.kind}-{before}{n}" for kind in kinds for n in range(1, count + 1)]


def test_ids_are_unique_across_the_folders() -> None:
    """Rows of one set would be taken for rows of the other."""
    ids = [task.id for folder in FOLDERS for task in all_tasks(load_tasks(folder))]
    assert len(set(ids)) == len(ids)


def test_no_two_prompts_begin_alike() -> None:
    """A prefix cache would serve one task from another one, and a cold figure would be a warm one."""
    beginnings = [task.turns[0][:200] for folder in FOLDERS for task in all_tasks(load_tasks(folder))]
    assert len(set(beginnings)) == len(beginnings)


def test_messages_have_the_lengths_of_their_kind(kinds: list[TaskKind]) -> None:
    """Summaries would be of two lines of text, or prompts would not fit into a context of 2,048 tokens."""
    for kind in kinds:
        low, high = WORDS[kind.kind]
        for task in kind.tasks:
            assert len(task.turns) == (3 if kind.kind == "turns" else 1)
            assert all(low <= len(turn.split()) <= high for turn in task.turns), task.id


def test_the_answer_of_a_retrieval_stands_in_one_passage(kinds: list[TaskKind]) -> None:
    """No reply could be right, or one that quotes another passage would be."""
    for task in tasks_of(kinds, "retrieval"):
        assert task.turns[0].count(task.check["text"]) == 1, task.id


def test_facts_stand_in_the_text_that_is_summarised(kinds: list[TaskKind]) -> None:
    """A faithful summary would miss a fact that was never told."""
    for task in tasks_of(kinds, "summary"):
        for spellings in task.check["facts"]:
            assert occurs(spellings, task.turns[0]), (task.id, spellings)


def test_lines_of_the_files_fit_the_editor(folder: Path) -> None:
    """A change to one word of a prompt would show up as a change of a line of 2,000 characters."""
    for path in folder.glob("*.json"):
        assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 130, path


def test_texts_in_pieces_are_joined(tmp_path: Path) -> None:
    """A prompt would reach the model as a list, or with line breaks that its author did not write."""
    document = deepcopy(FILE)
    document["system"] = ["Be ", "brief."]
    document["tasks"][0] |= {
        "turns": [["How are ", "you?\n", "Well?"]],
        "check": {"type": "chrf", "reference": ["I am ", "well."]},
    }
    (kind,) = load_one(tmp_path, document)
    assert (kind.system, kind.tasks[0].turns) == ("Be brief.", ("How are you?\nWell?",))
    assert kind.tasks[0].check["reference"] == "I am well."


def test_a_check_is_about_the_last_turn_unless_it_names_one(tmp_path: Path) -> None:
    """The reply to the first message would be held against what only the last one asks for."""
    document = deepcopy(FILE)
    words = {"type": "max_words", "words": 5}
    document["tasks"][0] |= {"turns": ["Hi", "And?"], "check": {"type": "all", "of": [words, words | {"turn": 1}]}}
    (kind,) = load_one(tmp_path, document)
    assert [part["turn"] for part in kind.tasks[0].check["of"]] == [2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 1}, "unknown field temperature"),
        ({"kind": "chats"}, "named for its kind"),
        ({"max_new_tokens": 0}, "whole number from 1"),
        ({"max_new_tokens": True}, "whole number from 1"),
        ({"system": ""}, "expected a text"),
        ({"tasks": []}, "at least one in tasks"),
        ({"tasks": {}}, "at least one in tasks"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A misspelled field would be ignored, and the run would be another one than its author meant."""
    with pytest.raises(ValueError, match=rf"chat\.json: .*{message}"):
        load_one(tmp_path, deepcopy(FILE) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "Hi"}, "unknown field prompt"),
        ({"turns": []}, "at least one in turns"),
        ({"turns": "Hi"}, "at least one in turns"),
        ({"turns": [" "]}, "expected a text"),
        ({"check": "max_words"}, "expected a check of a type in all, max_words"),
        ({"check": {"type": "max_word", "words": 5}}, "expected a check of a type in all, max_words"),
        ({"check": {"type": "max_words"}}, "words missing"),
        ({"check": {"type": "max_words", "words": "5"}}, "whole number"),
        ({"check": {"type": "max_words", "words": 5, "chars": 9}}, "unknown field chars"),
        ({"check": {"type": "max_words", "words": 5, "turn": 2}}, "about turn 2, but the task has 1"),
        ({"check": {"type": "all", "of": []}}, "list of checks"),
        ({"check": {"type": "all", "of": [{"type": "lacks", "none": "x"}]}}, "list of texts"),
        ({"check": {"type": "last_number", "answer": "12"}}, "expected a number"),
        ({"check": {"type": "json_fields", "expected": []}}, "object with fields"),
    ],
)
def test_a_wrong_task_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A benchmark would fail at its last task, after the models ran for an hour."""
    document = deepcopy(FILE)
    document["tasks"][0] |= change
    with pytest.raises(ValueError, match=rf"chat\.json: task 1: .*{message}"):
        load_one(tmp_path, document)


def test_what_is_no_task_file_is_refused(tmp_path: Path) -> None:
    """A wrong folder would give an empty table, a cut off file an error without the file's name."""
    with pytest.raises(ValueError, match="holds no JSON files"):
        load_tasks(tmp_path)
    (tmp_path / "chat.json").write_text("{")
    with pytest.raises(ValueError, match=r"chat\.json: Expecting"):
        load_tasks(tmp_path)
    with pytest.raises(ValueError, match=r"chat\.json: expected an object"):
        load_one(tmp_path, [])


def test_ids_that_occur_twice_are_refused(tmp_path: Path) -> None:
    """Results of one task would overwrite those of the other."""
    load_one(tmp_path, FILE)
    with pytest.raises(ValueError, match="occur twice: chat-1"):
        load_one(tmp_path, FILE | {"kind": "talk"}, "talk.json")


def tasks_of(kinds: list[TaskKind], name: str) -> tuple[Task, ...]:
    return next(kind.tasks for kind in kinds if kind.kind == name)
