"""A step of the draft head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.manifest import DRAFT


class DraftGuesses(NamedTuple):
    """The likeliest token after each sequence's last pair, its probability, and the head's own states [n, D] there."""

    tokens: list[int]
    scores: list[float]
    states: NDArray[np.generic]


class Pairs(NamedTuple):
    """Consecutive tokens of a sequence, and the state of the token before each.

    Args:
        slot: the place of the token before the first one in the text, and of the first pair in the draft head's cache.
        states: [n, D].
    """

    row: int
    slot: int
    tokens: Sequence[int] | NDArray[np.int64]
    states: NDArray[np.generic]


def run_draft_head(context: ExecutionContext, pairs: Sequence[Pairs], guess: bool = True) -> DraftGuesses:
    """Run the head for the ``pairs`` of sequences in rising rows, in one launch where its padding overruns no row.

    Args:
        guess: return its guesses, or else only keep the pairs in its cache.
    """
    first = pairs[0].row
    last = pairs[-1].row
    counts, slots, wanted = ([0] * (last - first + 1) for _ in range(3))
    for row, slot, tokens, _ in pairs:
        counts[row - first], slots[row - first], wanted[row - first] = len(tokens), slot, int(guess)
    if len(pairs) > 1 and not context.fits_together(first, counts, slots):
        parts = [run_draft_head(context, [one], guess) for one in pairs]
        guessed = [(token, score) for part in parts for token, score in zip(part.tokens, part.scores, strict=True)]
        states = np.concatenate([part.states for part in parts])
        return DraftGuesses([token for token, _ in guessed], [score for _, score in guessed], states)
    step = context.step(first, counts, wanted)
    begin = 0
    for _, _, tokens, states in pairs:
        end = begin + len(tokens)
        step.input_ids[begin:end], step.before[begin:end] = tokens, states
        begin = end
    step.place_pairs(slots)
    step.run_all([DRAFT])
    count = len(pairs) if guess else 0
    return DraftGuesses(step.token[:count].tolist(), step.score[:count].tolist(), step.states[:count].copy())
