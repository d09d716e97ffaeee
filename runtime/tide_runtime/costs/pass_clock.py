"""What full passes take, corrected while serving."""

from __future__ import annotations

import math
from collections.abc import Callable

from tide_runtime.costs.cost_model import CostModel

PassTime = Callable[[int, int, int], float]  # ms of a full pass, by batch size, tokens in all, tokens of the longest sequence


class PassClock:
    """Predicts the time of full passes: the cost model's, multiplied by n^tilt for n tokens a sequence. The exponent ``tilt`` is
    learned from passes while serving.

    How fast the time of a pass grows with its tokens depends on what else the machine does. A pass of one token waits for memory,
    larger ones compute, so that other programs slow down the one or the other: 3 tokens of an fp32 model took 1.07 passes of one
    token, and 1.32 within the same hour; 12 tokens 1.55, and 2.21. Passes that are padded to
    one size keep one predicted time.

    Args:
        rate: see `DepthTuning.clock_rate`.
        max_tilt: see `DepthTuning.max_clock_tilt`.
    """

    def __init__(self, costs: CostModel, rate: float, max_tilt: float) -> None:
        self._costs = costs
        self._rate = rate
        self._max_tilt = max_tilt
        self._level: dict[int, float] = {}  # batch size → log of the time of a pass of one token a sequence over its price
        self.tilt = 0.0

    def full(self, batch_size: int, tokens: int, longest: int) -> float:
        """ms of a pass for ``tokens`` tokens of ``batch_size`` sequences, ``longest`` of one of them."""
        price, least = self._costs.full(batch_size, tokens, longest), self._costs.full(batch_size, batch_size, 1)
        return price if price <= least else max(least, price * (tokens / batch_size) ** self.tilt)

    def pass_time(self, prompt_tokens: int = 0, before_ms: float = 0.0) -> PassTime:
        """Prices of passes that ``prompt_tokens`` share, after ``before_ms`` of drafting."""
        if prompt_tokens:
            return lambda batch_size, tokens, _: before_ms + self._costs.packed(batch_size, tokens, prompt_tokens)
        return lambda batch_size, tokens, longest: before_ms + self.full(batch_size, tokens, longest)

    def observe(self, batch_size: int, tokens: int, longest: int, ms: float) -> None:
        """A pass without prompts took ``ms``. One interruption of the process changes little, as errors are cut off."""
        log_ratio = math.log(ms / self._costs.full(batch_size, tokens, longest))
        level = self._level.get(batch_size)
        size = math.log(tokens / batch_size)
        if level is None:
            if not size:
                self._level[batch_size] = log_ratio
            return
        error = min(max(log_ratio - level - self.tilt * size, -self._max_tilt), self._max_tilt)
        if not size:
            self._level[batch_size] = level + self._rate * error
        else:
            step = self._rate * error * size / (size**2 + 0.5)
            self.tilt = min(max(self.tilt + step, -self._max_tilt), self._max_tilt)
