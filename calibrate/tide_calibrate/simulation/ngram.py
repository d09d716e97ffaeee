"""Depth zero in a simulation: what policy ``exact`` copies from the text so far.

The drafts are those of the runtime's own n-gram drafter; how many of them are checked at once follows its draft control
(tide_runtime.drafting.draft_length) for one row, on modelled times.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tide_runtime.drafting.draft_length import FIRST_HIT_RATE, HIT_WEIGHT
from tide_runtime.drafting.ngram import NgramDrafter

from tide_calibrate.traces.trace import OwnText

COPY_LIMIT = 12  # drafts copied at once, at most


class Copier:
    """One row whose text is known.

    Args:
        text: what the row will have written.
        pass_ms: [COPY_LIMIT + 2], ms of a pass through the whole model, by number of tokens.
        gain: tokens that drafting with exits gives in the time of one plain token; 1 without exits.
    """

    def __init__(self, text: OwnText, pass_ms: NDArray[np.float64], gain: float) -> None:
        self._text, self._gain = text, gain
        self._plain_over_pass = pass_ms[1] / pass_ms[2:]
        self._ngram, self._hit_rate = NgramDrafter(), FIRST_HIT_RATE
        self._hits: NDArray[np.bool_] = np.zeros(0, np.bool_)  # of the last guess

    def copy(self, position: int) -> tuple[int, int]:
        """How many tokens are copied when ``position`` new ones are written, and how many of them are right."""
        tokens, end = self._text.tokens, self._text.prompt + position
        guess = np.array(self._ngram.draft(tokens, end, min(COPY_LIMIT, len(tokens) - end - 1)), np.int64)
        self._hits = guess == tokens[end : end + len(guess)]
        count = self._worth_checking(len(guess))
        return count, _leading(self._hits[:count])

    def learn(self, made: int) -> None:
        """After the last guess ``made`` tokens came."""
        known = self._hits[:made]
        for hit in known[: _leading(known) + 1].tolist():
            self._hit_rate += HIT_WEIGHT * (hit - self._hit_rate)

    def _worth_checking(self, length: int) -> int:
        """How much of a guess to check for the most tokens per time; the n-th is right with probability hit rate to the n."""
        expected = 1 + np.cumsum(self._hit_rate ** np.arange(1, length + 1))
        return int(np.argmax([self._gain, *(expected * self._plain_over_pass[:length])]))


def _leading(hits: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    return int(np.logical_and.accumulate(hits).sum())
