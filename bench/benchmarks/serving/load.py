"""The load generator: requests, their clients in a closed loop (the next one after an answer) or an open one, and latencies.

A server is anything that streams tokens: one behind HTTP, or an engine in this process.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter
from typing import Protocol

import numpy as np
from tide_bench.paired_ratio import PairedRatio, paired_ratio

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Request:
    """``arrival_s``: seconds after the first moment; ``prompt``: token ids."""

    arrival_s: float
    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True)
class LengthMix:
    """Ranges of lengths in tokens, both ends included: prompts are drawn log-uniformly, new tokens uniformly.

    Raises ValueError for a range that is empty or starts below 1.
    """

    prompt: tuple[int, int]
    new: tuple[int, int]

    def __post_init__(self) -> None:
        for name, (low, high) in (("prompt", self.prompt), ("new", self.new)):
            if not 1 <= low <= high:
                raise ValueError(f"the range of {name} tokens is {low} to {high}; give 1 <= low <= high")

    def draw(self, count: int, random: np.random.Generator) -> list[tuple[int, int]]:
        """``count`` pairs (prompt tokens, new tokens)."""
        low, high = self.prompt
        prompts = np.floor(np.exp(random.uniform(np.log(low), np.log(high + 1), count))).clip(low, high)
        return list(zip(prompts.astype(int).tolist(), random.integers(self.new[0], self.new[1] + 1, count).tolist(), strict=True))


def requests(text: Sequence[int], mix: LengthMix, count: int, seed: int | Sequence[int]) -> list[Request]:
    """``count`` requests that arrive at once. Their prompts begin at random places of ``text`` (token ids), so that no two of
    them share a prefix. Raises ValueError when the text is too short for that."""
    random = np.random.default_rng(seed)
    last = len(text) - mix.prompt[1]
    if last < count:
        raise ValueError(f"the text has {len(text)} tokens; {count} prompts of up to {mix.prompt[1]} need more, ask for fewer")
    starts = random.choice(last, count, replace=False).tolist()
    lengths = mix.draw(count, random)
    return [Request(0.0, list(text[s : s + tokens]), new) for s, (tokens, new) in zip(starts, lengths, strict=True)]


def with_arrivals(planned: Sequence[Request], rate: float, seed: int) -> list[Request]:
    """The same requests, arriving as a Poisson process of ``rate`` requests/s; the first one arrives at 0 s."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(planned))
    arrivals = np.cumsum(gaps) - gaps[0]
    return [replace(request, arrival_s=float(at)) for request, at in zip(planned, arrivals, strict=True)]


class Server(Protocol):
    """What clients call, from many threads at once."""

    def stream(self, request: Request) -> Iterator[None]:
        """Send the request. An item for each token as it comes. Raises ArmError when there are not ``new_tokens`` of them."""


@dataclass(frozen=True)
class Served:
    """One answered request.

    Args:
        sent_s: seconds from the beginning of the run until it was sent, or was due in an open loop.
        first_token_s, last_token_s: seconds from then on, waiting included.
        gaps_s: seconds between neighbouring tokens.
        tokens: new tokens.
    """

    sent_s: float
    first_token_s: float
    last_token_s: float
    gaps_s: tuple[float, ...]
    tokens: int

    @classmethod
    def at(cls, sent: float, times: Sequence[float], tokens: int) -> Served:
        """The request that was ``sent``, with its tokens' ``times``, all in seconds since the beginning of the run."""
        gaps = tuple(after - before for before, after in itertools.pairwise(times))
        return cls(sent, times[0] - sent, times[-1] - sent, gaps, tokens)


@dataclass(frozen=True)
class LoadRun:
    """``seconds``: from the first request until the last answer; ``client_cpu_s``: CPU time of the process of the clients."""

    seconds: float
    served: list[Served]
    client_cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(one.tokens for one in self.served) / self.seconds


def closed_loop(server: Server, requests: Sequence[Request], clients: int) -> LoadRun:
    """``clients`` threads answer all of ``requests``; each takes the next one when its answer has ended."""
    waiting = iter(requests)
    lock = threading.Lock()

    def client(start: float) -> list[Served]:
        served = list[Served]()
        while True:
            with lock:
                request = next(waiting, None)
            if request is None:
                return served
            served.append(_answered(server, request, start, perf_counter() - start))

    cpu = time.process_time()
    start = perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        served = [one for own in list(pool.map(client, [start] * clients)) for one in own]
    return LoadRun(perf_counter() - start, served, time.process_time() - cpu)


def open_loop(server: Server, requests: Sequence[Request]) -> LoadRun:
    """Each request is sent at its ``arrival_s``, however many are still unanswered."""
    cpu = time.process_time()
    start = perf_counter()
    running = []
    with ThreadPoolExecutor(len(requests)) as pool:
        for request in requests:
            time.sleep(max(0.0, start + request.arrival_s - perf_counter()))
            running.append(pool.submit(_answered, server, request, start, request.arrival_s))
        served = [one.result() for one in running]
    return LoadRun(perf_counter() - start, served, time.process_time() - cpu)


def _answered(server: Server, request: Request, start: float, sent: float) -> Served:
    times = [perf_counter() - start for _ in server.stream(request)]
    return Served.at(sent, times, request.new_tokens)


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
