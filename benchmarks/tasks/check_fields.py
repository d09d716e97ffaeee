"""Fields of every type of check, and how they are read from JSON.

A text in a task file is a string or, as in notebooks, a list of pieces that are concatenated. Where a check looks for texts, each
is a string or a list of spellings of which one is enough; a ``*`` at the end of a spelling stands for the rest of a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

Reader = Callable[[Any], Any]


def text(found: Any) -> str:
    if isinstance(found, list) and found and all(isinstance(piece, str) for piece in found):
        return "".join(found)
    if not isinstance(found, str) or not found.strip():
        raise ValueError(f"expected a text or a list of its pieces, got {found!r}")
    return found


def whole(found: Any) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"expected a whole number from 1 on, got {found!r}")
    return found


def _number(found: Any) -> float:
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise ValueError(f"expected a number, got {found!r}")
    return found


def _object(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict) or not found:
        raise ValueError(f"expected an object with fields, got {found!r}")
    return found


def _texts(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or not found:
        raise ValueError(f"expected a list of texts, got {found!r}")
    return tuple(text(one) for one in found)


def _spellings(found: Any) -> tuple[tuple[str, ...], ...]:
    if not isinstance(found, list) or not found:
        raise ValueError(f"expected a list of texts or of lists of spellings, got {found!r}")
    return tuple(_texts(one if isinstance(one, list) else [one]) for one in found)


CHECK_FIELDS: Mapping[str, Mapping[str, Reader]] = {
    "max_words": {"words": whole},
    "sentences": {"count": whole},
    "lines": {"count": whole},
    "bullets": {"count": whole},
    "numbered": {"count": whole},
    "contains": {"all": _spellings},
    "lacks": {"none": _spellings},
    "in_order": {"texts": _texts},
    "starts_with": {"any": _texts},
    "ends_with": {"any": _texts},
    "facts": {"facts": _spellings},
    "asserts": {"asserts": _texts, "reference": text},
    "json_fields": {"expected": _object},
    "chrf": {"reference": text},
    "last_number": {"answer": _number},
    "phrase": {"text": text},
}


def read_check(found: Any, turns: int) -> dict[str, Any]:
    """A check of a task with so many turns, its texts joined.

    Type ``all`` has its parts in ``of``. Any other one may name the ``turn`` whose reply it is about, counted from 1; without, it
    is about the last one. Raises ValueError for an unknown type, fields that are unknown or missing, and unfit values.
    """
    kind = str(found.get("type")) if isinstance(found, dict) else ""
    if kind == "all":
        expect_fields(found, {"type", "of"})
        if not isinstance(found["of"], list) or not found["of"]:
            raise ValueError(f"a check of type 'all' needs a list of checks in 'of', got {found['of']!r}")
        return {"type": kind, "of": tuple(read_check(part, turns) for part in found["of"])}
    if kind not in CHECK_FIELDS:
        raise ValueError(f"expected a check of a type in {', '.join(['all', *CHECK_FIELDS])}, got {found!r}")
    readers = CHECK_FIELDS[kind]
    expect_fields(found, {"type", *readers}, {"turn"})
    if not 1 <= (turn := whole(found.get("turn", turns))) <= turns:
        raise ValueError(f"a check is about turn {turn}, but the task has {turns}")
    return {"type": kind, "turn": turn} | {name: read(found[name]) for name, read in readers.items()}


def expect_fields(found: Any, needed: Set[str], optional: Set[str] = frozenset()) -> None:
    """Raise ValueError unless ``found`` is an object that has all needed fields and no other ones but optional ones."""
    if not isinstance(found, dict):
        raise ValueError(f"expected an object with the fields {', '.join(sorted(needed))}, got {found!r}")
    if missing := needed - found.keys():
        raise ValueError(f"{', '.join(sorted(missing))} missing; there are {', '.join(found)}")
    if unknown := found.keys() - needed - optional:
        raise ValueError(f"unknown field {', '.join(sorted(unknown))}; known are {', '.join(sorted(needed | optional))}")
