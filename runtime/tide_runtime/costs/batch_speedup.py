"""What exits gain when several rows run at once, or when tokens are drawn at random, estimated before a text begins.

Rows of a batch share every launch, so few of them save much by stopping early, and on small models asking may cost more than
that. What a row says must not depend on its neighbours, so it is not their texts that decide whether exits are asked, but
how many rows run at once and what the calibration expects of each: a mean step of that many rows, priced. For ``exact``, whose
drafts are all run deep in the end, the price is that of ``exit`` without `propagate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tide_runtime.bundle.exits import Exit
from tide_runtime.costs.cost_model import CostModel

# What rows that wait for company, uneven rows and the loop take is not in the estimate: on the demo model 8 rows came to
# 0.5–0.65 of it.
LEAST_GAIN = 1.3
# A calibration foretells greedy texts. Those of the demo models that are drawn at temperature 0.8 gain about a fifth as much, and
# finding that out costs 2%: `exact`, predicted at 1.19 and 1.25 on one of them, came to 0.97; at 1.75 on the other, to 1.01.
LEAST_GREEDY_GAIN = 1.4


class ExitGate:
    """Whether to ask exits at all; a row alone whose tokens are certain finds out for itself (see `Trial`)."""

    def __init__(
        self,
        costs: CostModel,
        exits: Sequence[Exit],
        shares: Mapping[int, float],
        propagate: bool,
        predicted: float | None = None,
        unknown: bool = True,
    ) -> None:
        """Arguments as for `exit_gain`; ``predicted``: gain of one greedy row, None where nobody knows; ``unknown``: whether
        the gate is open to several rows without ``shares``."""
        self._costs, self._exits, self._shares, self._propagate = costs, exits, shares, propagate
        self._predicted, self._unknown, self._gains = predicted, unknown, dict[int, float]()

    def opens(self, rows: int, greedy: bool) -> bool:
        if not greedy and self._predicted is not None and self._predicted < LEAST_GREEDY_GAIN:
            return False
        if rows == 1:
            return True
        if not self._shares:
            return self._unknown
        if rows not in self._gains:
            self._gains[rows] = exit_gain(self._costs, self._exits, self._shares, rows, self._propagate)
        return self._gains[rows] >= LEAST_GAIN


def exit_gain(costs: CostModel, exits: Sequence[Exit], shares: Mapping[int, float], rows: int, propagate: bool) -> float:
    """Tokens/s of ``rows`` rows over those of plain decoding.

    Args:
        exits: those that may be taken, shallow first.
        shares: checkpoint → expected share of the tokens that stop there.
        propagate: whether skipped layers are never run; otherwise all tokens run them in the end.
    """
    ms, left, first = 0.0, float(rows), 0
    for exit in exits:
        ms += min(1.0, left) * costs.asking(_rows(left), first, exit)
        left, first = max(0.0, left - rows * shares.get(exit.info.checkpoint, 0.0)), exit.boundary
    if left > 0:
        launches, deep = min(1.0, left), _rows(left)
        tokens = deep if propagate else max(deep, round(rows / launches))
        last = costs.step(deep, deep)
        rest = costs.segments(deep, tokens, first, costs.depth, math.ceil(tokens / deep)) + last.logits_ms + last.host_ms
        ms += launches * (rest + (costs.fill(round((rows - left) / launches), exits[0]) if propagate else 0.0))
    return costs.full(rows, rows, 1) / ms


def _rows(left: float) -> int:
    return max(1, round(left))
