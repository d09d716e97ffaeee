"""Figures of load runs: percentiles of latencies, capacity, and ratios of neighbouring runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from tide_bench.paired_ratio import PairedRatio, paired_ratio

from benchmarks.serving.clients import LoadRun, Served

PERCENTILES = (50, 95, 99)


def latency_row(run: LoadRun) -> dict[str, float]:
    """Percentiles of time to first token (``ttft_ms_p50``) and between tokens (``itl_ms_p50``), and tokens/s."""
    first = [one.first_token_s for one in run.served]
    gaps = list(chain.from_iterable(one.gaps_s for one in run.served))
    row = {"requests": float(len(run.served)), "tokens_per_s": run.tokens_per_s}
    for name, seconds in (("ttft", first), ("itl", gaps)):
        row |= {f"{name}_ms_p{q}": 1e3 * value for q, value in percentiles(seconds).items()}
    return row


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """The `PERCENTILES`, linearly interpolated. Raises ValueError without values."""
    if not values:
        raise ValueError("no latencies were measured; give requests of 2 or more new tokens")
    return dict(zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True))


def capacity(served: Sequence[Served], clients: int) -> float:
    """Requests/s of a closed loop while all clients were busy: until the last request was sent, all but ``clients`` had ended.

    Raises ValueError when there are not more requests than clients.
    """
    if len(served) <= clients:
        raise ValueError(f"{len(served)} requests of {clients} clients show no capacity; give more requests than clients")
    return (len(served) - clients) / max(one.sent_s for one in served)


def speed_ratio(rounds: Sequence[Mapping[str, LoadRun]], arm: str, baseline: str) -> PairedRatio | None:
    """Speed (tokens/s) of ``arm`` over ``baseline`` in the rounds that both took part in; None without any."""
    both = [runs for runs in rounds if arm in runs and baseline in runs]
    if not both:
        return None
    own, theirs = ([1 / runs[name].tokens_per_s for runs in both] for name in (arm, baseline))
    return paired_ratio(theirs, own)
