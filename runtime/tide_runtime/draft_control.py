"""How a row's drafting adapts: which drafter is worth its cost just now, and how far ahead it should go.

The n-gram drafter is judged without being used: its guess is held against what came, so it is taken up as soon as the
text repeats. Asking exits costs, so they are on trial (`Trial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tide_runtime.ngram import NgramDrafter
from tide_runtime.step_costs import StepCosts
from tide_runtime.trial import Trial

_WEIGHT = 0.1  # of the newest token in the n-gram drafter's hit rate


@dataclass
class DraftControl:
    """The state of one row of a batch of ``rows``. ``guess``: what the n-gram drafter would say next."""

    costs: StepCosts
    rows: int
    limit: int
    exits: Trial
    ngram: NgramDrafter = field(default_factory=NgramDrafter)
    guess: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    hit_rate: float = 0.5  # of n-gram guesses, per token
    pass_costs: list[float] = field(init=False)  # of a pass over 1 + n tokens, plain decoding of one token being 1

    def __post_init__(self) -> None:
        single = self.costs.full(self.rows, 1)
        self.pass_costs = [self.costs.full(self.rows, 1 + n) / single for n in range(self.limit + 1)]

    def expected_tokens(self, copied: int) -> float:
        """Tokens that a pass over the last token and ``copied`` tokens of the guess gives: its own and what it confirms."""
        tokens = 1 + min(copied, len(self.guess))
        return (1.0 - self.hit_rate**tokens) / (1.0 - self.hit_rate) if self.hit_rate < 1.0 else tokens

    def learn(self, tokens: list[int]) -> None:
        """Hold the guess against the ``tokens`` that came."""
        for guessed, token in zip(self.guess.tolist(), tokens, strict=False):
            hit = guessed == token
            self.hit_rate += _WEIGHT * (hit - self.hit_rate)
            if not hit:
                break


def copy_length(controls: Sequence[DraftControl]) -> int:
    """How many tokens each row of a batch copies, at most, for the best expected rate of all rows together.

    A pass takes as long as its longest row; 0 when plain decoding, or the exits, do better.
    """
    best, best_gain = 0, sum(control.exits.gain for control in controls)
    for copied in range(1, max(len(control.guess) for control in controls) + 1):
        gain = sum(control.expected_tokens(copied) for control in controls) / controls[0].pass_costs[copied]
        if gain > best_gain:
            best, best_gain = copied, gain
    return best
