"""A step of the draft head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.manifest import DRAFT


def run_draft_head(
    context: ExecutionContext, rows: Sequence[int], tokens: Sequence[int], states: NDArray[np.generic], places: Sequence[int]
) -> tuple[list[int], list[float], NDArray[np.generic]]:
    """The head's guesses after ``tokens``, one of each of the rising ``rows``, with their scores and states.

    Args:
        states: [n, 2H], each before its token.
        places: positions of the tokens.
    """
    count, first = len(rows), rows[0]
    span = [0] * (rows[-1] - first + 1)
    at = list(span)
    for row, place in zip(rows, places, strict=True):
        span[row - first], at[row - first] = 1, place
    step = context.step(first, span, span)
    step.input_ids[:count], step.before[:count] = tokens, states
    step.place(at)
    step.run(DRAFT)
    return step.token[:count].tolist(), step.score[:count].tolist(), step.states[:count].copy()
