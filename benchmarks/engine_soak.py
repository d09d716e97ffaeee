"""20,000 requests on two engines with too little memory, each text compared with its text alone.

    python -m benchmarks.engine_soak
    python -m benchmarks.engine_soak --requests 2000 --seed 1

A tiny random Llama, policies full and exact, 32 threads and 32 asyncio tasks that draw from 400 distinct generations: random
lengths, system prompts that many share, second turns of chats, a third sampled with seeds. Callers cancel, set deadlines and
priorities, use cache salts of three tenants or no prefix cache, and send again what a full queue refuses. ``--kv-tokens`` of keys
and values are fewer than the sequences of a batch need, so sequences are preempted all the time. Every text is compared with the
one that an engine of one sequence, policy full and no prefix cache makes of the same prompt and seed.

Memory is the resident set after 40% of the requests and at the end, nothing running. Exit code 1 when a text is wrong, or a
request is lost or ends with an error.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Annotated

import psutil
import typer
from rich.progress import Progress
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime import Engine, EngineOptions, ThreadOptions

from benchmarks.models.model_folders import CACHE, TINY_KV_BYTES_PER_TOKEN, TINY_MAX_SEQ_LEN, TINY_VOCABULARY, tiny_bundle
from benchmarks.serving.soak import POLICIES, Callers, Expected, PoolText, Tally, first_turns, second_turns, soak_requests

FIRST_TURNS, SECOND_TURNS = 300, 100
MAX_BATCH, MAX_QUEUE = 16, 12
WARM_UP = 0.4  # of the requests; until then ONNX Runtime and NumPy meet new shapes
SLICES = 40  # of the requests, for the progress bar


def alone(bundle: Path, seed: int) -> tuple[list[PoolText], list[Expected]]:
    """The pool, and the text of each member on an engine that runs nothing else."""
    options = EngineOptions(policy="full", max_batch=1, prefix_cache=False, threads=ThreadOptions(1), verify=False)
    with Engine.load(bundle, options) as engine:

        def texts(pool: Sequence[PoolText]) -> list[Expected]:
            done = [engine.generate(list(text.prompt), text.params)[0] for text in pool]
            return [Expected(tuple(one.token_ids), one.finish_reason) for one in done]

        first = first_turns(FIRST_TURNS, TINY_VOCABULARY, seed)
        expected = texts(first)
        answers = [one.token_ids for one in expected]
        second = second_turns(first, answers, SECOND_TURNS, TINY_VOCABULARY, TINY_MAX_SEQ_LEN, seed)
        return first + second, expected + texts(second)


def leaked_bytes(engine: Engine) -> int:
    """Bytes of KV memory of an engine without requests that are neither free nor in its prefix cache."""
    stats = engine.stats()
    return stats.kv_memory - stats.free_bytes - stats.prefix_bytes


def add_tables(report: Report, outcomes: Mapping[str, int]) -> None:
    """How requests ended, and what the documentation says of the run."""
    report.table("Requests", ["outcome", "requests"], [[outcome, str(count)] for outcome, count in sorted(outcomes.items())])
    results, settings = report.results, report.settings
    report.statement(
        "Traffic changes no text",
        f"{settings['requests']:,} requests of {settings['callers']} callers to two engines of a tiny random model (`full`, "
        f"`exact`) with cancellations, deadlines, priorities and shared prefixes; {results['preemptions']:.0f} preemptions; "
        f"{results['wrong_texts']:.0f} texts differ from the text alone, {results['lost']:.0f} requests lost, "
        f"{results['leaked_kv_bytes']:.0f} bytes leaked, memory {results['memory_growth_pct']:+.1f}%.",
    )


def main(
    requests: Annotated[int, typer.Option(min=100, help="Requests in all.")] = 20_000,
    callers: Annotated[int, typer.Option(min=2, help="Callers at once, half threads and half asyncio tasks.")] = 64,
    kv_tokens: Annotated[int, typer.Option(min=TINY_MAX_SEQ_LEN, help="Tokens of the KV cache of each engine.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of texts and requests.")] = 0,
    cache: Annotated[Path, typer.Option(help="Where the bundle is kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Soak two engines and compare every text."""
    report = Report("engine_soak", requests=requests, callers=callers, kv_tokens=kv_tokens, seed=seed)
    bundle = tiny_bundle(cache)
    with console().status("texts alone"):
        texts, expected = alone(bundle, seed)
    planned, tally, process = soak_requests(requests, texts, seed), Tally(expected), psutil.Process()
    with ExitStack() as stack, Progress(console=console()) as progress:
        engines = {policy: stack.enter_context(_loaded(bundle, policy, kv_tokens)) for policy in POLICIES}
        sender = Callers(engines, texts, tally, threads=callers // 2, tasks=callers - callers // 2)
        warm = int(WARM_UP * requests)
        lost = sender.send(planned[:warm])
        gc.collect()
        before, start = process.memory_info().rss, perf_counter()
        size = -(-(requests - warm) // SLICES)
        for begin in progress.track(range(warm, requests, size), description=f"{requests - warm} requests"):
            lost += sender.send(planned[begin : begin + size])
        seconds = perf_counter() - start
        gc.collect()
        after = process.memory_info().rss
        stats = [engine.stats() for engine in engines.values()]
        report.add("requests", requests)
        report.add("wrong_texts", tally.outcomes["wrong"])
        report.add("lost", lost)
        report.add("errors", tally.outcomes["error"])
        for reason in ("cancelled", "deadline", "refused"):
            report.add(reason, tally.outcomes[reason])
        report.add("memory_mib", after / 2**20)
        report.add("memory_growth_pct", 100 * (after - before) / before)
        report.add("leaked_kv_bytes", sum(leaked_bytes(engine) for engine in engines.values()))
        report.add("preemptions", sum(one.preemptions for one in stats))
        report.add("prefix_hit_tokens", sum(one.prefix_tokens for one in stats))
        report.add("requests_per_s", (requests - warm) / seconds)
    for failure in tally.failures:
        console().print(failure, style="red", markup=False)
    add_tables(report, tally.outcomes)
    report.finish(json)
    raise typer.Exit(1 if lost or tally.outcomes["wrong"] or tally.outcomes["error"] else 0)


def _loaded(bundle: Path, policy: str, kv_tokens: int) -> Engine:
    options = EngineOptions(
        policy=policy,
        max_batch=MAX_BATCH,
        max_queue=MAX_QUEUE,
        kv_memory=kv_tokens * TINY_KV_BYTES_PER_TOKEN,
        threads=ThreadOptions(1),
        verify=False,
    )
    return Engine.load(bundle, options)


if __name__ == "__main__":
    typer.run(main)
