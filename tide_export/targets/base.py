"""What a target is: the passes that lower the contract's graphs for one kind of machine, and the backend that runs them."""

from __future__ import annotations

from dataclasses import dataclass

from tide_export.passes.base import GraphPass


@dataclass(frozen=True)
class Target:
    """``whole``: passes on the traced model before it is cut; ``pieces``: passes on each graph after the cut.

    ``several_rows``: passes that make of a lowered segment its form for steps of several rows; none: one form serves all.
    """

    name: str
    backend: str
    dtypes: tuple[str, ...]
    whole: tuple[GraphPass, ...]
    pieces: tuple[GraphPass, ...]
    description: str
    several_rows: tuple[GraphPass, ...] = ()
