"""Beginnings that texts share: what has to be held back of a text that comes in pieces, until it is certain whether a phrase
begins there, and what two texts begin with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile


def held_back(text: str, phrases: Collection[str]) -> int:
    """Length of the longest end of ``text`` that may turn out to be the beginning of one of ``phrases``."""
    longest = max(map(len, phrases), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(phrase.startswith(text[-length:]) for phrase in phrases):
            return length
    return 0


def shared_length(one: Sequence[str], other: Sequence[str]) -> int:
    """How many letters, or other parts, both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
