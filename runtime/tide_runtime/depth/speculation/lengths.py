"""How many drafts of each sequence are verified: for the most expected tokens per ms of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth_tuning import DepthTuning

PassTime = Callable[[int, int, int], float]  # ms of a full pass, by batch size, tokens in all, tokens of the longest sequence


class PassClock:
    """What full passes take: the cost model's prices, multiplied by n^tilt for n tokens a sequence. The exponent ``tilt`` is
    learned from passes while serving.

    How fast the time of a pass grows with its tokens depends on what else the machine does. A pass of one token waits for memory,
    larger ones compute, so that other programs slow down the one or the other: 3 tokens of an fp32 model took 1.07 passes of one
    token, and 1.32 within the same hour; 12 tokens 1.55, and 2.21. Prices that padding makes equal stay equal.
    """

    def __init__(self, costs: CostModel, tuning: DepthTuning) -> None:
        self._costs = costs
        self._rate = tuning.clock_rate
        self._most = tuning.max_clock_tilt
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
        found = math.log(ms / self._costs.full(batch_size, tokens, longest))
        level = self._level.get(batch_size)
        size = math.log(tokens / batch_size)
        if level is None:
            if not size:
                self._level[batch_size] = found
            return
        error = min(max(found - level - self.tilt * size, -self._most), self._most)
        if not size:
            self._level[batch_size] = level + self._rate * error
        else:
            step = self._rate * error * size / (size**2 + 0.5)
            self.tilt = min(max(self.tilt + step, -self._most), self._most)


class Lengths(NamedTuple):
    """``of``: drafts to verify of each sequence; ``rate``: tokens per ms that they promise."""

    of: list[int]
    rate: float


def choose_lengths(
    of_drafts: Sequence[Sequence[float]], pass_ms: PassTime, padding_penalty: float, least: float = 1.0
) -> Lengths:
    """The numbers of drafts with the most expected tokens per ms.

    Drafts are added in the order of the probability that they are accepted, of whatever sequence, while the pass that verifies
    them all gives a better rate. In a batch, which waits for its longest sequence, a cap of the drafts of each sequence
    is raised while that gives a better rate still.

    Args:
        of_drafts: of each sequence's drafts, the probability that it and all before it are accepted.
        padding_penalty: see `DepthTuning`.
        least: speedup over a pass without drafts that they must beat.
    """
    batch_size = len(of_drafts)
    most = max(map(len, of_drafts), default=0)
    full = pass_ms(batch_size, batch_size, 1)
    best = Lengths([0] * batch_size, least * batch_size / full)
    # Of equal chances the earlier token comes first: no token is drafted without those before it.
    ordered = sorted((-chance, n, i) for i, own in enumerate(of_drafts) for n, chance in enumerate(own, 1))
    cap = 1 if batch_size > 1 else most
    highest = 0.0
    while ordered:
        given = float(batch_size)
        longest = 1
        count = batch_size
        lengths = [0] * batch_size
        rate_at_cap = 0.0
        for negative, n, i in ordered:
            if n > cap:
                continue
            given, longest, count, lengths[i] = given - negative, max(longest, n + 1), count + 1, n
            padding = padding_penalty * full / batch_size * (batch_size * longest - count)
            rate = given / (pass_ms(batch_size, count, longest) + padding)
            rate_at_cap = max(rate_at_cap, rate)
            if rate > best.rate:
                best = Lengths(list(lengths), rate)
        if rate_at_cap < highest or cap >= most:
            break
        highest = rate_at_cap
        cap = max(cap + 1, 3 * cap // 2)
    return best
