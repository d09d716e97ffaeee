"""Cost of ragged batches, which drafts produce: time a few ragged shapes and separate padding from tokens.

Steps with one token per sequence run another attention form than all other steps (tide_runtime.backends.attention). The cost of
the first draft therefore does not lie on the line between even steps of one and of two tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from tide_runtime.backends.step_arrays import rounded_tokens
from tide_runtime.bundle.calibration import PADDING, StepCost

Counts = tuple[int, ...]  # tokens of each sequence

MIN_BATCH_SIZE = 4  # smaller batches are not measured by default, and contain little padding
MAX_PADDING = 0.9  # as a share of a token's time; a larger value is noise, and would leave no cost to the tokens


def ragged_shapes(batch_size: int, seqs: Sequence[int]) -> list[Counts]:
    """Ragged shapes to time: sequences of 1 or 2 tokens, and sequences of 1 to 4 tokens, 2 on average.

    A shape is only included if the even shapes it is compared with are timed, which have ``seqs`` tokens per sequence.
    """
    if batch_size < MIN_BATCH_SIZE or not {1, 2, 4} <= set(seqs):
        return []
    # GEMMs of the second shape then run on the same number of tokens as those of even sequences of two tokens.
    comparable = rounded_tokens(2 * batch_size, 4 * batch_size) == 2 * batch_size
    return [_one_or_two(batch_size), *([_one_to_four(batch_size)] if comparable else [])]


def _one_or_two(batch_size: int) -> Counts:
    twos = rounded_tokens(batch_size + 1, 2 * batch_size) - batch_size
    return (2,) * twos + (1,) * (batch_size - twos)


def _one_to_four(batch_size: int) -> Counts:
    fours, twos = divmod(batch_size, 3)
    return (4,) * fours + (2,) * twos + (1,) * (batch_size - fours - twos)


def fit_ragged(steps: Sequence[StepCost], pass_ms: Mapping[Counts, NDArray[np.float64]]) -> tuple[float, list[StepCost]]:
    """Fit the cost of padding, and for each batch size a step between 1 and 2 tokens per sequence without padding.

    Args:
        steps: costs of even batches.
        pass_ms: ms of a pass through all layers at each timed shape, [rounds]; the rounds of all shapes correspond.

    Returns:
        The cost of a padding token as a share of a token's, and the further steps.
    """
    timed = sorted({len(counts) for counts in pass_ms if len(set(counts)) > 1})
    shares = [_interpolate(pass_ms, _one_to_four(size), 2, 4) for size in timed if _one_to_four(size) in pass_ms]
    padding = float(np.clip(np.mean(shares), 0.0, MAX_PADDING)) if shares else PADDING
    between = []
    for batch_size in timed:
        counts = _one_or_two(batch_size)
        packed = float(np.clip((_interpolate(pass_ms, counts, 1, 2) - padding) / (1 - padding), 0.0, 1.0))
        one, two = (next(s for s in steps if (s.rows, s.seq) == (batch_size, size)) for size in (1, 2))
        between.append(replace(one.towards(two, packed), seq=sum(counts) / batch_size))
    return padding, between


def _interpolate(pass_ms: Mapping[Counts, NDArray[np.float64]], counts: Counts, low: int, high: int) -> float:
    """Position of the time of ``counts`` between those of even batches of ``low`` (0) and ``high`` (1) tokens per sequence.

    The shapes are compared round by round, because a temporary slowdown affects all shapes of a round. The variance is several
    times lower than with quartiles of each shape's own times.
    """
    fast, slow = (pass_ms[(size,) * len(counts)] for size in (low, high))
    valid = slow > fast
    shares = (pass_ms[counts] - fast)[valid] / (slow - fast)[valid]
    return float(np.median(shares)) if len(shares) else 0.0
