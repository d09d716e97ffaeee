"""What rows of different lengths cost, as drafts make them: a few shapes of them timed, and padding told from tokens.

Steps of one token a row run another form of the graphs than all other steps (tide_runtime.backends.attention). So the
first draft's cost is not on the line between even steps of one and of two tokens a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from tide_runtime.backends.step_arrays import rounded_tokens
from tide_runtime.bundle.calibration import PADDING, StepCost

Counts = tuple[int, ...]  # tokens of each row

LEAST_ROWS = 4  # fewer are not measured by default, and say little about padding
MOST_PADDING = 0.9  # of a token's time; more would be noise, and leave nothing to tell the tokens by


def uneven_rows(rows: int, seqs: Sequence[int]) -> list[Counts]:
    """Shapes to time: some rows with a token more; rows of 1 to 4 tokens, 2 on average. Only those that can be held against the
    even ones that are timed, of ``seqs`` tokens a row."""
    if rows < LEAST_ROWS or not {1, 2, 4} <= set(seqs):
        return []
    as_many = rounded_tokens(2 * rows, 4 * rows) == 2 * rows  # as products take for even rows of two tokens
    return [_some_longer(rows), *([_to_four(rows)] if as_many else [])]


def _some_longer(rows: int) -> Counts:
    longer = rounded_tokens(rows + 1, 2 * rows) - rows
    return (2,) * longer + (1,) * (rows - longer)


def _to_four(rows: int) -> Counts:
    fours, twos = divmod(rows, 3)
    return (4,) * fours + (2,) * twos + (1,) * (rows - fours - twos)


def fit_uneven(steps: Sequence[StepCost], whole_ms: Mapping[Counts, NDArray[np.float64]]) -> tuple[float, list[StepCost]]:
    """What padding takes of a token's time, and for each number of rows a step between 1 and 2 tokens a row without padding.

    Args:
        steps: of even rows.
        whole_ms: of a pass through all layers, at each shape that was timed; [rounds], of all shapes the same ones.
    """
    timed = sorted({len(counts) for counts in whole_ms if len(set(counts)) > 1})
    shares = [_share(whole_ms, _to_four(rows), 2, 4) for rows in timed if _to_four(rows) in whole_ms]
    padding = float(np.clip(np.mean(shares), 0.0, MOST_PADDING)) if shares else PADDING
    between = []
    for rows in timed:
        counts = _some_longer(rows)
        packed = float(np.clip((_share(whole_ms, counts, 1, 2) - padding) / (1 - padding), 0.0, 1.0))
        one, two = (next(s for s in steps if (s.rows, s.seq) == (rows, size)) for size in (1, 2))
        between.append(replace(one.towards(two, packed), seq=sum(counts) / rows))
    return padding, between


def _share(whole_ms: Mapping[Counts, NDArray[np.float64]], counts: Counts, low: int, high: int) -> float:
    """How far ``counts`` is from even rows of ``low`` tokens to those of ``high``: 0 at the first, 1 at the second.

    Told round by round, as a machine that is slow for a while is slow for all shapes: from quartiles of each shape's own times
    the share came out several times less sure.
    """
    shortest, longest = (whole_ms[(size,) * len(counts)] for size in (low, high))
    tells = longest > shortest
    shares = (whole_ms[counts] - shortest)[tells] / (longest - shortest)[tells]
    return float(np.median(shares)) if len(shares) else 0.0
