"""What has to be held back of a text that comes in pieces, until it is certain whether a phrase begins there."""

from __future__ import annotations

from collections.abc import Collection


def held_back(text: str, phrases: Collection[str]) -> int:
    """Length of the longest end of ``text`` that may turn out to be the beginning of one of ``phrases``."""
    longest = max(map(len, phrases), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(phrase.startswith(text[-length:]) for phrase in phrases):
            return length
    return 0
