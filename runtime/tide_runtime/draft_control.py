"""How a row's drafting adapts: which drafter is worth its cost just now, and how far ahead it should go.

The n-gram drafter is judged without being used: its guess is held against what came, so it is taken up as soon as the
text repeats. Asking exits costs, so they are on trial (`Trial`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tide_runtime.ngram import NgramDrafter
from tide_runtime.trial import Trial

_WEIGHT = 0.1  # of the newest token in the n-gram drafter's hit rate


@dataclass
class DraftControl:
    """The state of one row. ``guess``: what the n-gram drafter would say next."""

    exits: Trial
    ngram: NgramDrafter = field(default_factory=NgramDrafter)
    guess: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    hit_rate: float = 0.5  # of n-gram guesses, per token

    def learn(self, tokens: list[int]) -> None:
        """Hold the guess against the ``tokens`` that came."""
        for guessed, token in zip(self.guess.tolist(), tokens, strict=False):
            hit = guessed == token
            self.hit_rate += _WEIGHT * (hit - self.hit_rate)
            if not hit:
                break


def copy_lengths(controls: Sequence[DraftControl], pass_ms: Callable[[int, int], float]) -> list[int]:
    """How many tokens of its guess each row of a batch copies, for the best expected rate of all rows together.

    ``pass_ms``: what a pass through the whole model takes for so many rows of so many tokens in all.

    The n-th token of a guess is confirmed with probability hit_rate ** n, so tokens are taken in the order of these, of
    whatever row, as long as the pass that checks them all gives more for its time. None are where plain decoding, or the
    exits, do better.
    """
    rows = len(controls)
    tokens = [(control.hit_rate**n, row) for row, control in enumerate(controls) for n in range(1, len(control.guess) + 1)]
    tokens.sort(reverse=True)
    plain, given = pass_ms(rows, rows), float(rows)
    best, best_gain = 0, sum(control.exits.gain for control in controls)
    for count, (chance, _) in enumerate(tokens, start=1):
        given += chance
        gain = given * plain / pass_ms(rows, rows + count)
        if gain > best_gain:
            best, best_gain = count, gain
    lengths = [0] * rows
    for _, row in tokens[:best]:
        lengths[row] += 1
    return lengths
