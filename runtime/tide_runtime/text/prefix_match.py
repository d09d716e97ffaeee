"""Matches of beginnings: how much of a streamed text to hold back until it is certain whether a phrase begins there, and the
beginning that two texts have in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile


def partial_match_length(text: str, phrases: Collection[str]) -> int:
    """Length of the longest end of ``text`` that may turn out to be the beginning of one of ``phrases``."""
    longest = max(map(len, phrases), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(phrase.startswith(text[-length:]) for phrase in phrases):
            return length
    return 0


def common_prefix_length(one: Sequence[str], other: Sequence[str]) -> int:
    """How many letters, or other parts, both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
