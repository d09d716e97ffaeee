"""What exits gain when several sequences run at once, estimated before a text begins.

The sequences of a batch share every launch, so few of them save much by stopping early, and on small models evaluating an exit
may cost more than that. A sequence's text must not depend on the others of its batch. So their texts do not decide whether exits
are evaluated: the batch size and the calibration's expectation do, through the price of a mean step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from tide_runtime.bundle.exits import Exit
from tide_runtime.costs.cost_model import CostModel


def exits_pay(
    costs: CostModel, exits: Sequence[Exit], shares: Mapping[int, float], min_speedup: float, unknown: bool = True
) -> Callable[[int], bool]:
    """A function that says for a batch size whether exits are evaluated at all. A sequence alone finds out for itself (see
    `Backoff`).

    Args:
        exits, shares: see `batch_speedup`.
        min_speedup: see `DepthTuning.min_batch_speedup`.
        unknown: whether exits are evaluated in batches where ``shares`` is empty.
    """

    @cache
    def pay(batch_size: int) -> bool:
        if batch_size == 1:
            return True
        return batch_speedup(costs, exits, shares, batch_size) >= min_speedup if shares else unknown

    return pay


def batch_speedup(costs: CostModel, exits: Sequence[Exit], shares: Mapping[int, float], batch_size: int) -> float:
    """Tokens/s of ``batch_size`` sequences with exits over those of full-depth decoding.

    Args:
        exits: those that may be taken, shallow first.
        shares: checkpoint → expected share of the tokens that stop there.
    """
    ms = 0.0
    left = float(batch_size)
    first = 0
    for early_exit in exits:
        ms += min(1.0, left) * costs.evaluation(_whole(left), first, early_exit)
        left = max(0.0, left - batch_size * shares.get(early_exit.info.checkpoint, 0.0))
        first = early_exit.boundary
    if left > 0:
        times = min(1.0, left)
        deep = _whole(left)
        tokens = max(deep, round(batch_size / times))  # all tokens run all layers in the end
        ms += times * costs.finish(first, deep, tokens, math.ceil(tokens / deep), logits=deep)
    return costs.full(batch_size, batch_size, 1) / ms


def _whole(sequences: float) -> int:
    return max(1, round(sequences))
