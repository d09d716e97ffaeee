"""Names that an option of a benchmark lists, separated by commas."""

from __future__ import annotations

from collections.abc import Iterable

import typer


def chosen_names(given: str | None, known: Iterable[str], what: str) -> list[str]:
    """The names in ``given``, or all of ``known`` where there are none. Raises BadParameter for others; ``what`` these are."""
    known = list(known)
    names = [name.strip() for name in (given or "").split(",") if name.strip()] or known
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"{what} {', '.join(unknown)}; choose from: {', '.join(known)}")
    return names
