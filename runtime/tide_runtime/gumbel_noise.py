"""Random numbers of sampling: Gumbel noise that depends on the seed, the position and the token id, and on nothing else.

The noise comes from a counter-based generator, Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
so it needs no state: neither drafts, nor other sequences, nor an interruption change the noise of a position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_FEW = 128  # tokens that can win, whose words are drawn one by one: 50 of 128k take a quarter of the time of drawing all words
_WORDS = 4  # of one value of the generator's counter
_BLOCK = 8192  # tokens: arrays of a whole vocabulary would be mapped and unmapped in memory for each draw, which takes longer


class GumbelNoise:
    """The noise of one sequence.

    Args:
        seed: any integer >= 0; None takes fresh entropy of the operating system.
    """

    def __init__(self, seed: int | None) -> None:
        self._key = np.random.SeedSequence(seed).generate_state(2, np.uint64)

    def winner(self, position: int, scores: NDArray[np.float64]) -> int:
        """The token id with the largest sum of score and noise at ``position``.

        ``scores`` [V]: -inf for tokens that cannot win, at least one other. The generator's output number i after counter
        (0, position, 0, 0) belongs to token id i.
        """
        generator = np.random.Philox(key=self._key, counter=np.array([0, position, 0, 0], np.uint64))
        possible = np.flatnonzero(scores > -np.inf)
        if possible.size <= _FEW:
            return int(possible[np.argmax(scores[possible] + gumbel(_words(generator, possible)))])
        winner, largest = -1, -np.inf
        for begin in range(0, scores.size, _BLOCK):
            block = scores[begin : begin + _BLOCK]
            words = generator.random_raw(block.size)
            kept = np.flatnonzero(block > -np.inf)
            if kept.size:
                sums = block[kept] + gumbel(words[kept])
                place = int(np.argmax(sums))
                if sums[place] > largest:
                    winner, largest = begin + int(kept[place]), sums[place]
        return winner


def _words(generator: np.random.Philox, ids: NDArray[np.intp]) -> NDArray[np.uint64]:
    """The outputs number ``ids``, which rise, of a fresh ``generator``."""
    words, drawn, last = np.empty(ids.size, np.uint64), np.empty(0, np.uint64), -1
    for place, number in enumerate(ids.tolist()):
        counter, word = divmod(number, _WORDS)
        if counter != last:
            generator.advance(counter - last - 1)
            drawn, last = generator.random_raw(_WORDS), counter
        words[place] = drawn[word]
    return words


def gumbel(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Standard Gumbel noise from random ``words``: the upper 52 bits n of a word give the uniform number (n + 1/2) / 2^52.

    numpy's own distributions are not used, because their results may change with its version.
    """
    upper = (words >> np.uint64(12)).view(np.int64)  # conversion to float is faster from signed integers
    return np.asarray(-np.log(-np.log((upper + 0.5) * 2.0**-52)))
