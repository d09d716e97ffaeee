"""How many drafts of each sequence are verified: for the most expected tokens per ms of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tide_runtime.costs.pass_clock import PassTime


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
