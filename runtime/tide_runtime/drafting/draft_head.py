"""Drafts of the draft head: guesses from states of the last token that all layers have run for, then from its own.

A head of one feed-forward block, whose state goes on from guess to guess (EAGLE, Li et al. 2024, arXiv:2401.15077, which also has
attention; Hydra, Ankner et al. 2024, arXiv:2402.05109, without). In lazy depth its tokens wait in front of layer 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from tide_runtime.bundle.calibration import DraftHeadInfo
from tide_runtime.depth_tuning import DepthTuning
from tide_runtime.drafting.hit_rates import HitRates


@dataclass
class HeadDrafts:
    """What is known of the draft head in one sequence.

    Args:
        rates: of its guesses, by score.
        mean: of its guesses, whatever their score.
        tokens, scores: the guesses behind the sequence's last token.
        room: most guesses.
    """

    rates: HitRates
    mean: HitRates
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    room: int = 0

    @classmethod
    def start(cls, info: DraftHeadInfo, tuning: DepthTuning) -> HeadDrafts:
        usual = {score: share for score, share in info.classes}
        weight, memory = tuning.hit_rate_weight, tuning.hit_rate_memory
        mean = HitRates(weight, memory, {0.0: fmean(info.acceptance)})
        return cls(HitRates(weight, memory, usual), mean)

    @property
    def chances(self) -> list[float]:
        """Of each guess, that it and all before it are right."""
        return self.rates.chances(self.scores)

    @property
    def promise(self) -> float:
        """Right tokens to expect of as many guesses as there is room for."""
        right = self.mean.rate(0.0)
        return sum(right**n for n in range(1, self.room + 1))

    def start_guessing(self, room: int) -> None:
        """Forget the guesses; up to ``room`` new ones may be made."""
        self.tokens, self.scores, self.room = [], [], room

    def observe(self, tokens: Sequence[int]) -> None:
        """Learn from the ``tokens`` that followed."""
        self.rates.observe(self.tokens, self.scores, tokens)
        self.mean.observe(self.tokens, self.scores, tokens)
