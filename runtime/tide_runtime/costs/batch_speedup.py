"""What exits gain when several sequences run at once, estimated before a text begins.

The sequences of a batch share every launch, so few of them save much by stopping early, and on small models evaluating an exit
may cost more than that. A sequence's text must not depend on the others of its batch. So their texts do not decide whether exits
are evaluated: the batch size and the calibration's expectation do, through the price of a mean step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from tide_runtime.bundle.exits import Exit
from tide_runtime.costs.cost_model import CostModel, Launch
from tide_runtime.depth_tuning import DepthTuning


class ExitGate:
    """Whether exits are evaluated at all. A sequence alone finds out for itself (see `Backoff`).

    Args:
        exits, shares: see `batch_speedup`.
        unknown: whether exits are evaluated in batches where ``shares`` is empty.
    """

    def __init__(
        self,
        costs: CostModel,
        exits: Sequence[Exit],
        shares: Mapping[int, float],
        tuning: DepthTuning,
        unknown: bool = True,
    ) -> None:
        self._costs = costs
        self._exits = exits
        self._shares = shares
        self._tuning = tuning
        self._unknown = unknown
        self._speedups = dict[int, float]()

    def opens(self, batch_size: int) -> bool:
        if batch_size == 1:
            return True
        if not self._shares:
            return self._unknown
        if batch_size not in self._speedups:
            self._speedups[batch_size] = batch_speedup(self._costs, self._exits, self._shares, batch_size)
        return self._speedups[batch_size] >= self._tuning.min_batch_speedup


def batch_speedup(costs: CostModel, exits: Sequence[Exit], shares: Mapping[int, float], batch_size: int) -> float:
    """Tokens/s of ``batch_size`` sequences with exits over those of full-depth decoding.

    Args:
        exits: those that may be taken, shallow first.
        shares: checkpoint → expected share of the tokens that stop there.
    """
    launches = list[Launch]()
    left = float(batch_size)
    first = 0
    for early_exit in exits:
        launches += _each(costs.evaluate(_whole(left), first, early_exit), min(1.0, left))
        left = max(0.0, left - batch_size * shares.get(early_exit.info.checkpoint, 0.0))
        first = early_exit.boundary
    if left > 0:
        times = min(1.0, left)
        deep = _whole(left)
        tokens = max(deep, round(batch_size / times))  # all tokens run all layers in the end
        launches += _each(costs.finish(first, deep, tokens, math.ceil(tokens / deep), logits=deep), times)
    return costs.full(batch_size, batch_size, 1) / costs.price(launches)


def _each(launches: Iterable[Launch], times: float) -> list[Launch]:
    return [launch._replace(times=times) for launch in launches]


def _whole(sequences: float) -> int:
    return max(1, round(sequences))
