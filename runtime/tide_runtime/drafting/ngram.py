"""Depth zero: drafts copied from where the text so far went on after the same few tokens (prompt lookup, Saxena 2023).

https://github.com/apoorvumang/prompt-lookup-decoding
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ORDER = 3  # tokens that must match


class NgramDrafter:
    """The index of one sequence: the last place where each n-gram was seen."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._text: list[int] = []  # indexing lists takes a fraction of the time
        self._indexed = ORDER

    def draft(self, tokens: NDArray[np.int64], end: int, limit: int) -> list[int]:
        """Up to ``limit`` tokens likely to follow ``tokens[:end]``; none when its last n-gram is new. From one call to the next
        ``end`` never falls, and no token before it changes.

        Where the earlier place runs into the present the text repeats with that period, and the draft goes on repeating.
        """
        if end < ORDER or limit < 1:
            return []
        text = self._text
        text += tokens[len(text) : end].tolist()
        for place in range(self._indexed, end):
            self._places[tuple(text[place - ORDER : place])] = place
        self._indexed = max(self._indexed, end)
        seen = self._places.get(tuple(text[end - ORDER : end]))
        if seen is None:
            return []
        copied = text[seen : min(end, seen + limit)]
        return copied if len(copied) == limit else (copied * -(-limit // len(copied)))[:limit]
