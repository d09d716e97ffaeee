"""Scores of replies: each check on right and wrong ones, and on the references of the tasks themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.tasks.check_fields import CHECK_FIELDS, read_check
from benchmarks.tasks.checks import CHECKS, first_object, occurs, score
from benchmarks.tasks.code_check import first_python_block, passing_share
from benchmarks.tasks.task_set import PROMPTS, SECOND_PROMPTS, Task, load_tasks

ADD = "def add(a, b):\n    return a + b\n"
RIGHT_AND_WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "max_words", "words": 3}, "one two three", "one two three four"),
    ({"type": "sentences", "count": 2}, 'It rains 2.5 mm. "Really?"', "It rains."),
    ({"type": "lines", "count": 2}, "Name: Paws\n\nSlogan: Walk!\n", "Name: Paws Slogan: Walk!"),
    ({"type": "bullets", "count": 2}, "Here:\n- pot\n  * pan", "**Here**\n- pot\n1. pan"),
    ({"type": "numbered", "count": 2}, "1. Why?\n**2.** When?", "1. Why?\n3. When?"),
    ({"type": "contains", "all": ["tap", ["mend", "repair*"]]}, "The TAP needs repairing.", "The tape needs repairing."),
    ({"type": "lacks", "none": ["encrypt*"]}, "It locks passwords away.", "Encryption locks them away."),
    ({"type": "in_order", "texts": ["Venus", "Mars"]}, "Mars? No: Venus, Earth, Mars", "Mars, Venus"),
    ({"type": "starts_with", "any": ["Name:", "Title:"]}, "**Name:** Paws", "The name: Paws"),
    ({"type": "ends_with", "any": ["?"]}, 'And you, "why?"\n', "Why? Because."),
    ({"type": "facts", "facts": [["two", "2"], "clock"]}, "2 bells and a clock", "three bells, 12 hours"),
    ({"type": "asserts", "asserts": ["assert add(1, 2) == 3"], "reference": ADD}, f"Sure:\n```python\n{ADD}```", "a + b"),
    ({"type": "json_fields", "expected": {"name": "Ana"}}, 'Here it is: {"name": " ana"}', '{"name": "Anna"}'),
    ({"type": "chrf", "reference": "Das Wasser ist kalt."}, "Das Wasser ist kalt.", "xyz"),
    ({"type": "last_number", "answer": 1250}, "5 x 250 = **1,250**.", "1250 - 50 = 1200"),
    ({"type": "phrase", "text": "the bell at eight"}, "He heard the  bell\nAt eight.", "He heard a bell at eight."),
]


def check_score(check: Mapping[str, Any], *replies: str) -> float:
    return score(Task("t", ("?",) * len(replies), read_check(check, len(replies))), replies)


def parts(check: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Checks that a check consists of."""
    yield from check["of"] if check["type"] == "all" else (check,)


def parts_of_type(kind: str) -> list[tuple[Task, Mapping[str, Any]]]:
    tasks = [task for folder in (PROMPTS, SECOND_PROMPTS) for kinds in load_tasks(folder) for task in kinds.tasks]
    return [(task, part) for task in tasks for part in parts(task.check) if part["type"] == kind]


def test_every_type_has_fields_and_a_function() -> None:
    """A task file would load, and its score would be a KeyError at the end of the run."""
    assert CHECKS.keys() == CHECK_FIELDS.keys() == {check["type"] for check, _, _ in RIGHT_AND_WRONG}


@pytest.mark.parametrize(("check", "right", "wrong"), RIGHT_AND_WRONG, ids=[check["type"] for check, _, _ in RIGHT_AND_WRONG])
def test_right_and_wrong_replies(check: dict[str, Any], right: str, wrong: str) -> None:
    """A quality column would praise wrong replies, or blame right ones."""
    assert check_score(check, right) == pytest.approx(1)
    assert check_score(check, wrong) == 0
    assert check_score(check, " \n") == 0


def test_all_is_the_share_of_parts_that_hold() -> None:
    """A reply that follows two of three instructions would count as none, or as all."""
    check = {
        "type": "all",
        "of": [{"type": "max_words", "words": 9}, {"type": "ends_with", "any": ["?"]}, {"type": "lines", "count": 1}],
    }
    assert check_score(check, "It is blue.") == pytest.approx(2 / 3)


def test_a_check_reads_the_reply_of_its_turn() -> None:
    """The score of a conversation would be that of its last reply alone."""
    check = {"type": "max_words", "words": 1}
    assert check_score(check | {"turn": 1}, "one", "one two") == 1
    assert check_score(check, "one", "one two") == 0


def test_a_missing_reply_is_an_error() -> None:
    """A run that was cut short would be scored as a weak model."""
    with pytest.raises(ValueError, match="2 turns, got 1"):
        score(Task("t", ("a", "b"), read_check({"type": "max_words", "words": 1}, 2)), ["one"])


@pytest.mark.parametrize(
    ("spelling", "text", "found"),
    [
        ("12", "120 of 312", False),
        ("12", "(12)", True),
        ("deposit", "deposits", False),
        ("deposit*", "Deposits", True),
        ("don't stop", "we don’t\nstop", True),
        ("three-day", "three–day", True),
        ("Spoke & Chain", "**SPOKE & CHAIN**", True),
        ("35%", "by 35%.", True),
    ],
)
def test_spellings_are_whole_words(spelling: str, text: str, found: bool) -> None:
    """The fact "12" would be found in "120", or a curly apostrophe would hide a word."""
    assert occurs([spelling], text) is found


@pytest.mark.parametrize(
    ("reply", "last"),
    [
        ("= 1,250.50 dollars.", 1250.5),
        ("10-3 is 7, so 7", 7),
        ("It falls to −4", -4),
        ("39.5 m2", 39.5),
        ("39.5 m²", 39.5),
        (r"\boxed{177}", 177),
        ("(15)", 15),
        ("1, 2, 3", 3),
        ("€393", 393),
    ],
)
def test_the_last_number(reply: str, last: float) -> None:
    """A right answer with a unit, a thousands separator or a currency would count as wrong."""
    assert check_score({"type": "last_number", "answer": last}, reply) == 1
    assert check_score({"type": "last_number", "answer": last + 1}, reply) == 0


def test_no_number_is_wrong() -> None:
    """A refusal would be an error in place of a wrong answer."""
    assert check_score({"type": "last_number", "answer": 1}, "I don't know.") == 0


@pytest.mark.parametrize(
    ("found", "equal"),
    [
        ({"n": 5.0, "b": True, "s": " GRAZ ", "l": ["x", "Y"], "z": None}, 5),
        ({"n": "5", "b": 1, "s": "Gra", "l": ["x"], "z": ""}, 0),
        ({"n": True, "b": "true", "s": None, "l": "x, y"}, 0),
        ({"n": 5, "b": False}, 1),
    ],
)
def test_json_fields_are_compared_by_their_type(found: dict[str, Any], equal: int) -> None:
    """The number 5 as a text, or 1 as true, would pass for data that a program can use; a missing null as one that was given."""
    check = {"type": "json_fields", "expected": {"n": 5, "b": True, "s": "Graz", "l": ["x", "y"], "z": None}}
    assert check_score(check, f"```json\n{json.dumps(found, indent=2)}\n```") == pytest.approx(equal / 5)


def test_the_first_json_object_counts() -> None:
    """Braces in the sentence before would hide the object, or a second guess would be taken."""
    assert first_object('{so} I read: {"a": {"b": 1}} or {"a": 2}') == {"a": {"b": 1}}
    assert first_object('{"a": ') == {}


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```\nls\n```\n```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```\n```\ny = 1\n```", "x = 1\n"),
        ("Here:\n```Python\nx = 1\n", "x = 1\n"),
        ("```py\nx = 1\n```\n```python\ny = 1\n```", "x = 1\n"),
        ("x = 1\n", "x = 1\n"),
    ],
)
def test_the_code_of_a_reply(reply: str, code: str) -> None:
    """A shell command would run as Python, or code without its closing fence would be lost."""
    assert first_python_block(reply) == code


def test_each_assert_counts_for_itself() -> None:
    """One failure would hide the asserts that pass, or code that cannot be imported would pass some."""
    asserts = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "raise SystemExit", "assert add('a', 'b') == 'ab'"]
    assert passing_share(ADD, asserts) == 0.5
    assert passing_share(ADD + "input()\n", asserts) == 0
    assert passing_share("def add(a, b:", asserts) == 0


def test_asserts_before_a_loop_without_end_count() -> None:
    """The benchmark would hang on a reply, or a slow last case would cost those that passed."""
    code = ADD + "def spin():\n    while True:\n        pass\n"
    assert passing_share(code, ["assert add(1, 2) == 3", "spin()", "assert add(1, 2) == 3"], seconds=1) == pytest.approx(1 / 3)


def test_code_cannot_take_all_memory() -> None:
    """A reply would push the models that are being measured out of memory."""
    assert passing_share("held = None\n", ["held = bytearray(8 << 30)"]) == 0


def test_code_runs_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a reply writes would lie in the checkout, or its output would stand in the tables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDE_SECRET", "x")
    code = "import os\nopen('mine.txt', 'w').write('x')\nprint('noise')\nsecret = os.environ.get('TIDE_SECRET')\n"
    assert passing_share(code, ["import os\nassert os.path.exists('mine.txt')", "assert secret is None"]) == 1
    assert not list(tmp_path.iterdir())


def test_what_the_code_started_ends_with_it(tmp_path: Path) -> None:
    """Processes of replies would go on and disturb the timings."""
    file = str(tmp_path / "pid")
    code = f"import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nopen({file!r}, 'w').write(str(child.pid))\n"
    assert passing_share(code, ["assert True"]) == 1
    pid, end = int((tmp_path / "pid").read_text()), time.monotonic() + 5
    while runs(pid):
        assert time.monotonic() < end
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("task", "check"), [pytest.param(*pair, id=f"{pair[0].id}-{pair[1]['turn']}") for pair in parts_of_type("asserts")]
)
def test_references_pass_and_the_code_given_does_not(task: Task, check: Mapping[str, Any]) -> None:
    """No reply could be right, or one that repeats the user's code would be."""
    assert passing_share(check["reference"], check["asserts"]) == 1
    if "```" in task.turns[0]:
        assert passing_share(task.turns[0], check["asserts"]) < 1


def test_the_expected_object_of_an_extraction_scores_1() -> None:
    """No reply could reach the full score."""
    for task, check in parts_of_type("json_fields"):
        assert CHECKS["json_fields"](json.dumps(check["expected"]), check) == 1, task.id


def test_a_reference_translation_scores_1_and_the_source_little() -> None:
    """A reply that repeats the text in its own language would look like a translation."""
    for task, check in parts_of_type("chrf"):
        assert score(task, [check["reference"]]) == pytest.approx(1), task.id
        assert score(task, [task.turns[0]]) < 0.35, task.id


def test_the_other_references_score_1_and_prompts_do_not() -> None:
    """A problem could be answered by repeating it, or by nothing."""
    for task, check in parts_of_type("last_number"):
        assert CHECKS["last_number"](f"So it is {check['answer']:,}.", check), task.id
        assert not CHECKS["last_number"](task.turns[0], check), task.id
    for task, check in parts_of_type("phrase"):
        assert score(task, [f'"{check["text"].upper()}."']) == 1, task.id
    for task, check in parts_of_type("facts"):
        assert score(task, [" ".join(spellings[0].rstrip("*") for spellings in check["facts"])]) == 1, task.id
        assert score(task, ["I cannot sum that up."]) == 0, task.id
