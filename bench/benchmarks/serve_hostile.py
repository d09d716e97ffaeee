"""`tide-serve` under hostile clients: how much slower the answers of other clients get, and how much memory the server needs.

    python -m benchmarks.serve_hostile                 # SmolLM2-135M-Instruct, int4, on the CPU; within 5 minutes
    python -m benchmarks.serve_hostile engine/         # a bundle of one's own

Two normal clients send short requests, each its next one after an answer: beside each attack, and in turn with that, in an order
that changes with every round, without attackers. Streams whose client does not read are compared with the same streams read at
once, as generating them takes time in both cases. Attackers are a process of their own on the same machine and send at a steady
rate; server, attackers and normal clients share the processor. The prefix cache is off, as it would grow with every request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Annotated

import numpy as np
import typer
from rich.progress import Progress
from tide_bench.arms.process import ArmError
from tide_bench.counters import OtherLoad
from tide_bench.report import Report
from tide_bench.tables import console

from benchmarks.chosen_names import chosen_names
from benchmarks.models.gguf_files import TITLE, folder_of
from benchmarks.models.model_folders import CACHE
from benchmarks.serving.hostile_clients import ATTACKS, CONTROLS, REFUSALS, Attack, attacking
from benchmarks.serving.http_server import TideServe, tide_serve
from benchmarks.serving.load import Request

CLIENTS, PROMPT_TOKENS, NEW_TOKENS = 2, 16, 8
BAR = 1.5


def latencies(server: TideServe, seconds: float, seed: str) -> list[float]:
    """Seconds from sending to the last token of the normal clients' requests during ``seconds``."""
    end = perf_counter() + seconds

    def client(number: int) -> list[float]:
        random = Random(f"{seed} {number}")
        found = list[float]()
        while (sent := perf_counter()) < end:
            prompt = [random.randrange(20, 250) for _ in range(PROMPT_TOKENS)]  # ids that every vocabulary has
            for _ in server.stream(Request(0.0, prompt, NEW_TOKENS)):
                pass
            found.append(perf_counter() - sent)
        return found

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [one for own in pool.map(client, range(CLIENTS)) for one in own]


def memory_mib(server: TideServe) -> float:
    return float(server.process.memory_info().rss / 2**20)


def peak_mib(server: TideServe) -> float:
    """The most memory that the server held since this was last called."""
    folder = Path(f"/proc/{server.process.pid}")
    peak = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("VmHWM:"))
    (folder / "clear_refs").write_text("5")  # proc(5): count anew
    return int(peak.split()[1]) / 1024


def run_phase(
    server: TideServe, attack: Attack | None, seconds: float, rate: float, seed: str
) -> tuple[list[float], Counter[int]]:
    """Latencies of the normal clients beside ``attack``, and the statuses that the attackers were answered with."""
    if attack is None:
        return latencies(server, seconds, seed), Counter()
    host, port = server.address.split(":")
    with attacking(attack, host, int(port), rate) as answers:
        found = latencies(server, seconds, seed)
    return found, answers


def main(
    bundle: Annotated[Path | None, typer.Argument(help="A bundle. Default: SmolLM2-135M-Instruct, int4.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each attack.")] = 4,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each round, with attackers and again without.")] = 3.5,
    rate: Annotated[float, typer.Option(min=0.1, help="Hostile requests per second.")] = 5.0,
    attacks: Annotated[str, typer.Option(help="Attacks, separated by commas.")] = ",".join(ATTACKS),
    cache: Annotated[Path, typer.Option(help="Where weights and engines are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Attack a server while others use it."""
    chosen = chosen_names(attacks, ATTACKS, "attack")
    model = TITLE if bundle is None else bundle.name
    report = Report("serve_hostile", model=model, rounds=rounds, seconds=seconds, rate=rate, attacks=attacks)
    folder = folder_of("int4", cache) if bundle is None else bundle
    try:
        with tide_serve(folder, "--no-prefix-cache") as server, Progress(console=console()) as progress:
            load = OtherLoad([server.process.pid])
            measure(server, chosen, rounds, seconds, rate, report, progress)
            report.settings["other_load"] = load.share()
    except ArmError as error:
        console().print(f"serve_hostile cannot go on: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    add_tables(report)
    console().print(f"other processes, attackers included, took {report.settings['other_load']:.0%} of the CPU")
    report.finish(json)
    results = report.results
    safe = results["hostile_worst_p95_ratio"] <= BAR and not results["unexpected_answers"] and results["server_alive"]
    raise typer.Exit(0 if safe else 1)


def measure(
    server: TideServe, attacks: Sequence[str], rounds: int, seconds: float, rate: float, report: Report, progress: Progress
) -> None:
    """Each attack in rounds with what it is compared with."""
    latencies(server, 2 * seconds, "warm-up")
    before = memory_mib(server)
    unexpected = 0
    bar = progress.add_task("attacks", total=2 * rounds * len(attacks))
    for name in attacks:
        phases: dict[str, Attack | None] = {"attacked": ATTACKS[name], "compared": CONTROLS.get(name)}
        found = {phase: list[float]() for phase in phases}
        answers = Counter[int]()
        peak_mib(server)
        for number in range(rounds):
            for phase in list(phases)[:: 1 if number % 2 else -1]:
                times, statuses = run_phase(server, phases[phase], seconds, rate, f"{name} {phase} {number}")
                found[phase] += times
                answers += statuses if phase == "attacked" else Counter()
                progress.advance(bar)
        unexpected += sum(count for status, count in answers.items() if name in REFUSALS and status != REFUSALS[name])
        p95, usual = (1e3 * float(np.percentile(found[phase], 95)) for phase in phases)
        report.rows.append(
            {
                "attack": name,
                "requests": len(found["attacked"]),
                "p50_ms": 1e3 * float(np.percentile(found["attacked"], 50)),
                "p95_ms": p95,
                "compared_p95_ms": usual,
                "ratio": p95 / usual,
                "peak_growth_mib": peak_mib(server) - before,
                "answers": {str(status): count for status, count in sorted(answers.items())},
            }
        )
        report.add(f"p95_ratio_{name}", p95 / usual)
    report.add("hostile_worst_p95_ratio", max(row["ratio"] for row in report.rows))
    report.add("memory_growth_mib", memory_mib(server) - before)
    report.add("memory_peak_growth_mib", max(row["peak_growth_mib"] for row in report.rows))
    report.add("unexpected_answers", unexpected)
    report.add("server_alive", float(server.process.is_running() and server.metric("tide_running") == 0))


def add_tables(report: Report) -> None:
    """How each attack went, and the worst of them."""
    rows = []
    for row in report.rows:
        times = [f"{row[name]:.1f}" for name in ("p50_ms", "p95_ms", "compared_p95_ms")]
        answers = ", ".join(f"{status}: {count}" for status, count in row["answers"].items())
        growth = f"{row['peak_growth_mib']:+.0f}"
        rows.append([row["attack"], str(row["requests"]), *times, f"{row['ratio']:.2f}", growth, answers])
    headings = ["attack", "requests", "p50, ms", "p95, ms", "compared p95, ms", "ratio", "memory, MiB", "answers"]
    report.table(
        "Hostile clients", headings, rows, "what other clients of tide-serve notice: their latency, and its p95 without."
    )
    report.statement(
        "The worst attack",
        "under slow readers, 10 MB bodies, 100,000-character stop lists, nested schemas, invalid UTF-8 and 1,000 idle "
        "connections, in turn, the 95th percentile of other clients' latency was at most "
        f"{report.results['hostile_worst_p95_ratio']:.2f} times what it is without.",
    )


if __name__ == "__main__":
    typer.run(main)
