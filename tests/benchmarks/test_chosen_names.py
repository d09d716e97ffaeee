"""Names that an option of a benchmark lists."""

from __future__ import annotations

import pytest
import typer

from benchmarks.chosen_names import chosen_names

KNOWN = {"int4": 4, "int8": 8}


@pytest.mark.parametrize(("given", "names"), [("int8", ["int8"]), (" int8,int4 ", ["int8", "int4"]), (None, ["int4", "int8"])])
def test_names_come_as_they_are_listed(given: str | None, names: list[str]) -> None:
    """Breaks: a benchmark leaves out what was asked for, or runs nothing where nothing was left out."""
    assert chosen_names(given, KNOWN, "weights") == names


def test_an_unknown_name_is_refused_before_anything_runs() -> None:
    """Breaks: a misspelt name costs the run, or ends it with a KeyError after an hour."""
    with pytest.raises(typer.BadParameter, match="weights int3, int5; choose from: int4, int8"):
        chosen_names("int3,int4,int5", KNOWN, "weights")
