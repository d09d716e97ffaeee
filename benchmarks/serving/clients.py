"""Clients of a server, a thread each: in a closed loop (the next request after an answer) and in an open loop (at set times)."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from tide_bench.load import Request


class Server(Protocol):
    """What clients call, from many threads at once."""

    def stream(self, request: Request) -> Iterator[None]:
        """Send the request; an item for each token as it comes. Raises ArmError when there are not ``new_tokens`` of them."""


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
        """From the moment of sending and those of the tokens, all in seconds since the beginning of the run."""
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
    waiting, lock = iter(requests), threading.Lock()

    def client(start: float) -> list[Served]:
        served = list[Served]()
        while True:
            with lock:
                request = next(waiting, None)
            if request is None:
                return served
            served.append(_answered(server, request, start, perf_counter() - start))

    cpu, start = time.process_time(), perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        served = [one for own in list(pool.map(client, [start] * clients)) for one in own]
    return LoadRun(perf_counter() - start, served, time.process_time() - cpu)


def open_loop(server: Server, requests: Sequence[Request]) -> LoadRun:
    """Each request is sent at its ``arrival_s``, however many are still unanswered."""
    cpu, start = time.process_time(), perf_counter()

    def client(request: Request) -> Served:
        time.sleep(max(0.0, start + request.arrival_s - perf_counter()))
        return _answered(server, request, start, request.arrival_s)

    with ThreadPoolExecutor(len(requests)) as pool:
        served = list(pool.map(client, requests))
    return LoadRun(perf_counter() - start, served, time.process_time() - cpu)


def _answered(server: Server, request: Request, start: float, sent: float) -> Served:
    times = [perf_counter() - start for _ in server.stream(request)]
    return Served.at(sent, times, request.new_tokens)
