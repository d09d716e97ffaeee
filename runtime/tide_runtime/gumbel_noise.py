"""Random numbers of sampling: Gumbel noise that depends on the seed, the position and the token id, and on nothing else.

The noise comes from a counter-based generator, Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
so it needs no state: neither drafts, nor other sequences, nor an interruption change the noise of a position.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tide_runtime.sampling_filters import TINY, Ids, Values, weights

_FEW = 128  # tokens that can win, whose words are drawn one by one: 50 of 128k take a quarter of the time of drawing all words
_WORDS = 4  # 64-bit words that the generator draws for one value of its counter
_BLOCK = 16384  # tokens: arrays of a whole vocabulary would be mapped and unmapped in memory for each draw, which takes longer
_LARGEST_EXPONENT = 88.0  # exp of it is about the largest float32, which bounds every (1 - u) / w
_SLACK = 1.001  # exceeds the rounding error of weights, whose logits are rounded to float32


class GumbelNoise:
    """The noise of one sequence.

    Args:
        seed: any integer >= 0; None takes fresh entropy of the operating system.
    """

    def __init__(self, seed: int | None) -> None:
        self.key = np.random.SeedSequence(seed).generate_state(2, np.uint64).astype(np.uint64)

    def winner(self, position: int, values: Values, temperature: float, ids: Ids | None = None) -> int:
        """The token id with the largest sum of logit over temperature and noise at ``position``.

        The generator's output number i after counter (0, position, 0, 0) belongs to token id i.

        Args:
            values: [n] logits, at least one above -inf.
            ids: [n] their tokens, ascending; None: 0 to n - 1.
        """
        if ids is not None and ids.size <= _FEW:
            return int(ids[np.argmax(self._sums(position, ids, values, temperature, values.max()))])
        if ids is not None:
            every = np.full(ids[-1] + 1, -np.inf, np.float32)
            every[ids], values = values, every
        return _race(self._generator(position), values, temperature)

    def _sums(self, position: int, ids: Ids, values: Values, temperature: float, best: np.float32) -> NDArray[np.float64]:
        """[n] of few tokens ``ids``, ascending."""
        return _scores(values, temperature, best) + gumbel(_words(self._generator(position), ids))

    def _generator(self, position: int) -> np.random.Philox:
        return np.random.Philox(key=self.key, counter=np.array([0, position, 0, 0], np.uint64))


def _race(generator: np.random.Philox, values: Values, temperature: float) -> int:
    """The winner among all tokens, of which only those are looked at closely that can win.

    With u the uniform number of a token and w its `weights`, its sum is -log(-log(u) / w), so the smallest -log(u) / w wins. That
    is at least (1 - u) / w, of which no logarithm is taken.
    """
    best = values.max()
    winner = -1
    largest = -np.inf
    for begin in range(0, values.size, _BLOCK):
        block = values[begin : begin + _BLOCK]
        words = generator.random_raw(block.size)

        def sums(places: Ids, block: Values = block, words: NDArray[np.uint64] = words) -> NDArray[np.float64]:
            return _scores(block[places], temperature, best) + gumbel(words[places])

        left = (np.invert(words) >> np.uint64(40)).astype(np.uint32)  # 2^24 (1 - u), rounded down
        least = left.astype(np.float32) * np.float32(2.0**-24) / np.maximum(weights(block, temperature, best), TINY)
        nearest = np.argmin(least, keepdims=True)
        if least[nearest] <= _limit(largest):
            bound = max(largest, sums(nearest)[0])
            near = np.flatnonzero(least <= _limit(bound))
            found = sums(near)
            if found.max() > largest:
                winner = begin + int(near[np.argmax(found)])
                largest = found.max()
    return winner


def _limit(sum_of_another: float) -> float:
    """What (1 - u) / w has at most where a token's sum is above that of another."""
    return _SLACK * math.exp(min(-sum_of_another, _LARGEST_EXPONENT))


def _scores(values: Values, temperature: float, best: np.float32) -> NDArray[np.float64]:
    """[n] logits ``values`` over the temperature, ``best`` at 0."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        return np.asarray((values.astype(np.float64) - best) / temperature)


def _words(generator: np.random.Philox, ids: NDArray[np.intp]) -> NDArray[np.uint64]:
    """The outputs number ``ids``, which rise, of a fresh ``generator``."""
    words = np.empty(ids.size, np.uint64)
    drawn = np.empty(0, np.uint64)
    last = -1
    for place, number in enumerate(ids.tolist()):
        counter, word = divmod(number, _WORDS)
        if counter != last:
            generator.advance(counter - last - 1)
            drawn = generator.random_raw(_WORDS)
            last = counter
        words[place] = drawn[word]
    return words


def gumbel(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Standard Gumbel noise from random ``words``: the upper 52 bits n of a word give the uniform number (n + 1/2) / 2^52.

    numpy's own distributions are not used, because their results may change with its version.
    """
    upper = (words >> np.uint64(12)).view(np.int64)  # conversion to float is faster from signed integers
    return np.asarray(-np.log(-np.log((upper + 0.5) * 2.0**-52)))
