"""Mode load of a comparison: short and long requests at random times (Poisson arrivals), for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from tide_bench.arm_pool import ArmPool, RunningArm
from tide_bench.arms import ArmSpec
from tide_bench.arms.base import Arm, with_limitation
from tide_bench.arms.process import ArmError
from tide_bench.config import BenchConfig
from tide_bench.load import LoadRun, Request, open_loop, with_arrivals
from tide_bench.output_checks import Terms, broken_promise
from tide_bench.report import Phases
from tide_bench.rounds import SETTLE_S

# Kinds whose engines take calls of several threads at once; the others serve one request after the other.
CONCURRENT = {"tide": 8, "unsplit": 8, "static": 8}
SHORT_SHARE = 4  # every other request wants a quarter of the tokens


def poisson_requests(rate: float, seconds: float, prompts: Sequence[list[int]], new_tokens: int, seed: int = 0) -> list[Request]:
    """Requests of ``seconds`` seconds at ``rate`` a second on average; prompts in turn, outputs long and short in turn."""
    short, count = max(2, new_tokens // SHORT_SHARE), max(1, int(4 * rate * seconds))
    planned = [Request(0.0, prompts[i % len(prompts)], short if i % 2 else new_tokens) for i in range(count)]
    return [request for request in with_arrivals(planned, rate, seed) if request.arrival_s < seconds]


class ArmServer:
    """An arm as the load generator calls it. ``limitation``: as in `Timing`."""

    def __init__(self, arm: Arm, options: Mapping[str, Any]) -> None:
        self.limitation: str | None = None
        self._arm, self._options, self._texts = arm, options, dict[int, list[int]]()

    def stream(self, request: Request) -> Iterator[float]:
        begin = perf_counter()
        timing = self._arm.generate([request.prompt], request.new_tokens, **self._options)
        self._texts[id(request)], self.limitation = timing.tokens[0], timing.limitation
        yield begin + timing.first_token_s
        yield begin + timing.first_token_s + timing.decode_s

    def texts(self, requests: Sequence[Request]) -> list[list[int]]:
        """The new tokens of each of ``requests``."""
        return [self._texts[id(request)] for request in requests]


def serve(
    arm: Arm, requests: Sequence[Request], workers: int, options: Mapping[str, Any]
) -> tuple[LoadRun, list[list[int]], str | None]:
    """Runs in the arm's process: requests are taken in the order they come, ``workers`` at once.

    Returns the run, the new tokens of each request, and what limits the arm.
    """
    server = ArmServer(arm, options)
    run = open_loop(server, requests, workers)
    return run, server.texts(requests), server.limitation


def load_rows(
    pool: ArmPool,
    specs: Sequence[ArmSpec],
    prompts: Sequence[list[int]],
    terms: Terms,
    config: BenchConfig,
    phases: Phases,
) -> list[dict[str, Any]]:
    """A row for each rate and arm; rates are shares of the rate at which `full` serves one request after the other.

    ``mark``: why an arm is not ranked: its answers against those of `full` to the same requests.
    """
    specs = [replace(c, options=c.options | {"concurrent": CONCURRENT[c.kind]}) if c.kind in CONCURRENT else c for c in specs]
    entries = pool.start(specs, lambda entry: _warm_up(entry, prompts, config.new_tokens))
    alone = next((_one_by_one(e, prompts, config.new_tokens) for e in entries if e.spec.name == config.pivot), None)
    if alone is None:
        return [{"arm": c.name, "title": c.title, "note": pool.failures.get(c.name, "`full` did not run")} for c in specs]
    rows = []
    for share in config.rates:
        requests = poisson_requests(share / alone, config.seconds, prompts, config.new_tokens)
        own, answers = [], dict[str, list[list[int]]]()
        for entry in entries:
            time.sleep(SETTLE_S)
            with phases(f"{len(requests)} requests, {share / alone:.1f} a second", entry.spec.title):
                row, answers[entry.spec.name] = _row(pool, entry, requests)
            own.append({"share": share, "rate": share / alone, **row})
        prompts_sent, references = [request.prompt for request in requests], answers[config.pivot]
        for row, entry in zip(own, entries, strict=True):
            texts = answers[entry.spec.name]
            if texts and references:
                row["mark"] = broken_promise(entry.spec.promise, prompts_sent, texts, references, pool.gap, terms)
        rows += own
    failed = [c for c in specs if c.name in pool.failures and all(row["arm"] != c.name for row in rows)]
    return rows + [{"arm": c.name, "title": c.title, "note": pool.failures[c.name]} for c in failed]


def _warm_up(entry: RunningArm, prompts: Sequence[list[int]], new_tokens: int) -> None:
    """Every shape once: compiled code is made for it."""
    for prompt in {len(prompt): prompt for prompt in prompts}.values():
        for tokens in {new_tokens, max(2, new_tokens // SHORT_SHARE)}:
            entry.generate([prompt], tokens)


def _one_by_one(entry: RunningArm, prompts: Sequence[list[int]], new_tokens: int) -> float:
    """Mean seconds of a request."""
    begin, sizes = time.perf_counter(), (new_tokens, max(2, new_tokens // SHORT_SHARE))
    for i, prompt in enumerate(prompts[:8]):
        entry.generate([prompt], sizes[i % 2])
    return (time.perf_counter() - begin) / len(prompts[:8])


def _row(pool: ArmPool, entry: RunningArm, requests: Sequence[Request]) -> tuple[dict[str, Any], list[list[int]]]:
    """The figures of one arm at ``requests``, and its answers: none when it failed."""
    row: dict[str, Any] = {"arm": entry.spec.name, "title": entry.spec.title, "requests": len(requests)}
    workers = CONCURRENT.get(entry.spec.kind, 1)
    try:
        run, texts, limitation = entry.process.apply(serve, list(requests), workers, entry.spec.options)
    except ArmError as error:
        pool.note_failure(entry.spec, str(error))
        return row | {"note": str(error)}, []
    percentile = partial(np.percentile, q=(50, 95))
    first, last = (percentile([getattr(s, name) for s in run.served]) for name in ("first_token_s", "last_token_s"))
    end = max(s.sent_s + s.last_token_s for s in run.served)
    figures = {
        "title": with_limitation(entry.spec.title, limitation),
        "workers": workers,
        "first_token_ms": 1e3 * float(first[0]),
        "first_token_ms_p95": 1e3 * float(first[1]),
        "request_ms": 1e3 * float(last[0]),
        "request_ms_p95": 1e3 * float(last[1]),
        "tokens_per_s": sum(map(len, texts)) / end,
    }
    return row | figures, texts
