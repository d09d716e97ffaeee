"""What rows of different lengths cost, as drafts make them: a few shapes of them timed, and padding told from tokens.

Rows of one token each run in another form of the graphs than all other steps (tide_runtime.backends.attention_form), so what the
first draft costs is no line between even steps of one and of two tokens a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from tide_runtime.backends.step_arrays import rounded_tokens
from tide_runtime.calibration import PADDING, StepCost

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


def fit_uneven(steps: Sequence[StepCost], whole_ms: Mapping[Counts, float]) -> tuple[float, list[StepCost]]:
    """What padding takes of a token's time, and for each number of rows a step between 1 and 2 tokens a row without padding.

    Args:
        steps: of even rows.
        whole_ms: of a pass through all layers, at each shape that was timed.
    """
    timed = sorted({len(counts) for counts in whole_ms if len(set(counts)) > 1})
    even = {rows: {s: whole_ms[(s,) * rows] for s in (1, 2, 4)} for rows in timed}
    telling = [rows for rows, ms in even.items() if _to_four(rows) in whole_ms and ms[4] > ms[2]]
    shares = [(whole_ms[_to_four(rows)] - even[rows][2]) / (even[rows][4] - even[rows][2]) for rows in telling]
    padding = float(np.clip(np.mean(shares), 0.0, MOST_PADDING)) if shares else PADDING
    between = []
    for rows, ms in even.items():
        counts = _some_longer(rows)
        packed = (whole_ms[counts] - padding * ms[2]) / (1 - padding)
        share = float(np.clip((packed - ms[1]) / (ms[2] - ms[1]), 0.0, 1.0)) if ms[2] > ms[1] else 0.0
        one, two = (next(s for s in steps if (s.rows, s.seq) == (rows, size)) for size in (1, 2))
        between.append(replace(one.towards(two, share), seq=sum(counts) / rows))
    return padding, between
