"""How often text drafts are accepted, by how many tokens before them matched."""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.drafting.text_drafter import Guess

# Least matched tokens of a class → share of tokens that were the ones after the match, in texts of SmolLM2-135M-Instruct:
# python -m benchmarks.text_drafts
USUAL_RATES = {1: 0.24, 2: 0.53, 3: 0.69, 4: 0.77, 6: 0.86, 9: 0.91, 14: 0.96, 24: 0.99}
_CLASSES = [sum(least <= matched for least in USUAL_RATES) - 1 for matched in range(1, max(USUAL_RATES) + 1)]


class HitRates:
    """A running rate for each class of match lengths in one sequence.

    Args:
        weight: outcomes that the usual rate of a class counts as.
        memory: outcomes of a class over which its rate is averaged; older ones count ever less.
    """

    def __init__(self, weight: float, memory: float) -> None:
        self._kept, self._weight = 1 - 1 / memory, weight
        self._usual = list(USUAL_RATES.values())
        self._hits, self._tries = [0.0] * len(self._usual), [0.0] * len(self._usual)

    def rate(self, matched: int) -> float:
        """Probability that the next token is the one that followed the last ``matched`` ones before."""
        index = _class_of(matched)
        return (self._hits[index] + self._weight * self._usual[index]) / (self._tries[index] + self._weight)

    def chances(self, guess: Guess) -> list[float]:
        """Probability of each token of ``guess`` that it and all before it are accepted."""
        chance, chances = 1.0, []
        for matched in range(guess.matched, guess.matched + len(guess.tokens)):
            chance *= self.rate(matched)
            chances.append(chance)
        return chances

    def observe(self, guess: Guess, tokens: Sequence[int]) -> None:
        """``tokens`` followed where ``guess`` was made. What is behind the first wrong one tells nothing."""
        for place, (guessed, token) in enumerate(zip(guess.tokens, tokens, strict=False)):
            index = _class_of(guess.matched + place)
            self._hits[index] = self._kept * self._hits[index] + (guessed == token)
            self._tries[index] = self._kept * self._tries[index] + 1
            if guessed != token:
                break


def _class_of(matched: int) -> int:
    return _CLASSES[min(matched, len(_CLASSES)) - 1]
