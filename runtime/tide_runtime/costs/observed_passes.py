"""Passes through all layers as the cost model prices them, corrected by the time that they take while serving.

How fast the time of a pass grows with its tokens depends on what else the machine does. A pass of one token waits for memory,
larger ones compute, so that other programs slow down the one or the other. Measured with the same fp32 model on the same shared
machine within an hour: 3 tokens took 1.07 passes of one token, and 1.32; 12 tokens 1.55, and 2.21.
"""

from __future__ import annotations

import math

from tide_runtime.costs.cost_model import CostModel

_RATE = 1 / 16  # of a correction at each pass
_OUTLIER = 0.3  # largest error of a logarithm that is learned from: the process may be interrupted
_LEAST_TILT, _MOST_TILT = -0.2, 0.3  # 12 tokens at 0.6 to 2.1 times the price of the table


class ObservedPasses:
    """Multiplies the price of a pass of n tokens a sequence by n^tilt, and learns the exponent ``tilt`` from passes.

    Where passes were not measured (`CostModel`), prices stay as they are.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._level: dict[int, float] = {}  # batch size → log of the time of a pass of one token a sequence over its price
        self.tilt = 0.0

    def full(self, batch_size: int, tokens: int, longest: int) -> float:
        """ms of a pass for ``tokens`` tokens of ``batch_size`` sequences, ``longest`` of one of them."""
        price = self._costs.full(batch_size, tokens, longest)
        if not self.tilt or tokens == batch_size:
            return price
        return max(self._costs.full(batch_size, batch_size, 1), price * (tokens / batch_size) ** self.tilt)

    def observe(self, batch_size: int, tokens: int, longest: int, ms: float) -> None:
        """A pass took ``ms``."""
        if not self._costs.has_measured_passes:
            return
        found = math.log(ms / self._costs.full(batch_size, tokens, longest))
        level, size = self._level.get(batch_size), math.log(tokens / batch_size)
        if level is None:
            if not size:
                self._level[batch_size] = found
            return
        error = min(max(found - level - self.tilt * size, -_OUTLIER), _OUTLIER)
        if not size:
            self._level[batch_size] = level + _RATE * error
        else:
            self.tilt = min(max(self.tilt + _RATE * error * size / (size**2 + 0.5), _LEAST_TILT), _MOST_TILT)
