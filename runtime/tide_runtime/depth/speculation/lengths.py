"""How many drafts of each sequence are verified: for the most expected tokens per ms of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tide_runtime.costs.pass_clock import PassTime


class DraftLengths(NamedTuple):
    """``per_sequence``: drafts to verify of each sequence; ``tokens_per_ms``: tokens per ms that they promise."""

    per_sequence: list[int]
    tokens_per_ms: float


def choose_lengths(
    acceptance: Sequence[Sequence[float]], pass_ms: PassTime, padding_penalty: float, min_speedup: float = 1.0
) -> DraftLengths:
    """The numbers of drafts with the most expected tokens per ms.

    Drafts are added in the order of the probability that they are accepted, of whatever sequence, while the pass that verifies
    them all gives a better rate. In a batch, which waits for its longest sequence, a cap of the drafts of each sequence
    is raised while that gives a better rate still.

    Args:
        acceptance: for each sequence and draft, the probability that this draft and all before it are accepted.
        padding_penalty: see `DepthTuning`.
        min_speedup: over a pass without drafts; smaller speedups give no drafts.
    """
    batch_size = len(acceptance)
    max_drafts = max(map(len, acceptance), default=0)
    full = pass_ms(batch_size, batch_size, 1)
    best = DraftLengths([0] * batch_size, min_speedup * batch_size / full)
    # Of equal chances the earlier token comes first: no token is drafted without those before it.
    ordered = sorted((-chance, n, i) for i, chances in enumerate(acceptance) for n, chance in enumerate(chances, 1))
    cap = 1 if batch_size > 1 else max_drafts
    highest = 0.0
    while ordered:
        expected_tokens = float(batch_size)
        longest = 1
        count = batch_size
        lengths = [0] * batch_size
        rate_at_cap = 0.0
        for negative, n, i in ordered:
            if n > cap:
                continue
            expected_tokens, longest, count, lengths[i] = expected_tokens - negative, max(longest, n + 1), count + 1, n
            padding = padding_penalty * full / batch_size * (batch_size * longest - count)
            rate = expected_tokens / (pass_ms(batch_size, count, longest) + padding)
            rate_at_cap = max(rate_at_cap, rate)
            if rate > best.tokens_per_ms:
                best = DraftLengths(list(lengths), rate)
        if rate_at_cap < highest or cap >= max_drafts:
            break
        highest = rate_at_cap
        cap = max(cap + 1, 3 * cap // 2)
    return best
