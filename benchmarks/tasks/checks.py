"""Scores of replies, 0 to 1: one function a type of check, on the text of one reply.

Words are compared regardless of case, white space, and the shapes of quotation marks and dashes.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sacrebleu import sentence_chrf

from benchmarks.tasks.code_check import passing_share
from benchmarks.tasks.task_set import Task

Check = Mapping[str, Any]
PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "‐": "-", "‑": "-", "–": "-", "—": "-", "−": "-"})
MARKUP = "*_#>` "  # Markdown before or behind a text
NUMBER = re.compile(r"(?<!\w)-?\d+(?:,\d{3})*(?:\.\d+)?")
SENTENCE_END = re.compile(r"[.!?]+[\"')*_]*(?=\s|$)")
SAME_NUMBER = 1e-6


def score(task: Task, replies: Sequence[str]) -> float:
    """Score of the replies to a task's turns, 0 to 1; a check of type ``all`` counts the share of its parts that hold.

    Raises ValueError when there are not as many replies as turns.
    """
    if len(replies) != len(task.turns):
        raise ValueError(f"task {task.id} has {len(task.turns)} turns, got {len(replies)} replies; give one to each")
    return _score(task.check, replies)


def _score(check: Check, replies: Sequence[str]) -> float:
    if check["type"] == "all":
        return sum(_score(part, replies) for part in check["of"]) / len(check["of"])
    reply = replies[check["turn"] - 1]
    return float(CHECKS[check["type"]](reply, check)) if reply.strip() else 0.0


def plain(text: str) -> str:
    """A text as it is compared: casefolded, with single spaces and ASCII quotation marks and dashes."""
    return " ".join(unicodedata.normalize("NFC", text).translate(PLAIN).casefold().split())


def occurs(spellings: Sequence[str], reply: str) -> bool:
    """Whether one of the spellings stands in a reply as whole words; ``*`` at its end allows for the rest of a word."""
    return any(_pattern(spelling).search(plain(reply)) for spelling in spellings)


def _pattern(spelling: str) -> re.Pattern[str]:
    word = plain(spelling)
    end = "" if word.endswith("*") or not word[-1].isalnum() else r"(?!\w)"
    return re.compile((r"(?<!\w)" if word[0].isalnum() else "") + re.escape(word.removesuffix("*")) + end)


def max_words(reply: str, check: Check) -> bool:
    return bool(len(reply.split()) <= check["words"])


def sentences(reply: str, check: Check) -> bool:
    """Whether there are so many ends of sentences; abbreviations with a full stop count as such an end too."""
    return bool(len(SENTENCE_END.findall(reply)) == check["count"])


def lines(reply: str, check: Check) -> bool:
    """Whether there are so many lines that are not blank."""
    return bool(sum(bool(line.strip()) for line in reply.splitlines()) == check["count"])


def bullets(reply: str, check: Check) -> bool:
    return bool(len(re.findall(r"^\s*[-*•]\s+\S", reply, re.MULTILINE)) == check["count"])


def numbered(reply: str, check: Check) -> bool:
    """Whether the lines that begin with a number are 1 to the count."""
    return [int(n) for n in re.findall(r"^[\s*_#]*(\d{1,3})[.):]", reply, re.MULTILINE)] == list(range(1, check["count"] + 1))


def contains(reply: str, check: Check) -> bool:
    return all(occurs(spellings, reply) for spellings in check["all"])


def lacks(reply: str, check: Check) -> bool:
    return not any(occurs(spellings, reply) for spellings in check["none"])


def in_order(reply: str, check: Check) -> bool:
    """Whether all texts occur, each one behind the one before."""
    whole, place = plain(reply), 0
    for text in check["texts"]:
        found = _pattern(text).search(whole, place)
        if not found:
            return False
        place = found.end()
    return True


def starts_with(reply: str, check: Check) -> bool:
    return plain(reply).lstrip(MARKUP).startswith(tuple(plain(text) for text in check["any"]))


def ends_with(reply: str, check: Check) -> bool:
    return plain(reply).rstrip(MARKUP + "\"'").endswith(tuple(plain(text) for text in check["any"]))


def facts(reply: str, check: Check) -> float:
    """Share of the facts that the reply mentions."""
    return sum(occurs(spellings, reply) for spellings in check["facts"]) / len(check["facts"])


def asserts(reply: str, check: Check) -> float:
    """Share of the asserts that pass on the reply's code."""
    return passing_share(reply, check["asserts"])


def json_fields(reply: str, check: Check) -> float:
    """Share of the expected fields that the reply's first JSON object has with an equal value."""
    found = first_object(reply)
    return sum(name in found and _equal(found[name], value) for name, value in check["expected"].items()) / len(check["expected"])


def first_object(reply: str) -> dict[str, Any]:
    """The first JSON object that a text holds; empty when it holds none."""
    for start in re.finditer("{", reply):
        try:
            return dict(json.JSONDecoder().raw_decode(reply, start.start())[0])
        except ValueError:
            continue
    return {}


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(found, str) and isinstance(expected, str):
        return plain(found) == plain(expected)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    return isinstance(found, bool) == isinstance(expected, bool) and found == expected


def chrf(reply: str, check: Check) -> float:
    """chrF2 against the reference: F-score of character 1- to 6-grams, recall weighs twice as much (Popović, 2015)."""
    return sentence_chrf(reply, [check["reference"]]).score / 100


def last_number(reply: str, check: Check) -> bool:
    """Whether the last number of the reply is the answer; commas may separate thousands."""
    numbers = NUMBER.findall(plain(reply))
    return bool(numbers) and abs(float(numbers[-1].replace(",", "")) - check["answer"]) < SAME_NUMBER


def phrase(reply: str, check: Check) -> bool:
    return plain(check["text"]) in plain(reply)


CHECKS: Mapping[str, Callable[[str, Check], float]] = {
    check.__name__: check
    for check in (
        max_words,
        sentences,
        lines,
        bullets,
        numbered,
        contains,
        lacks,
        in_order,
        starts_with,
        ends_with,
        facts,
        asserts,
        json_fields,
        chrf,
        last_number,
        phrase,
    )
}
