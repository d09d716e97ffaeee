"""Part `poisson` of engine_load: requests of mixed lengths at random times, TIDE int4 beside llama.cpp's server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tide_bench.report import Report

from benchmarks.serving.clients import LoadRun
from benchmarks.serving.latency import PERCENTILES, capacity, latency_row
from benchmarks.serving.load_arms import LoadArm, LoadArms
from benchmarks.serving.workload import LengthMix, requests, with_arrivals

MIX = LengthMix(prompt=(16, 900), new=(16, 96))
SHARES = (50, 80, 95)  # of TIDE's capacity, in percent
SEQUENCES, CONTEXT = 16, 1024
CAPACITY_REQUESTS = 4 * SEQUENCES
ARMS = (
    LoadArm("tide", "TIDE int4, submit", "int4", SEQUENCES, CONTEXT),
    LoadArm("llamacpp", "llama.cpp server", "Q4_1 of the GGUF file", SEQUENCES, CONTEXT),
)


@dataclass(frozen=True)
class PoissonRuns:
    """``capacity``: arm → requests/s; ``rates``: share in percent → requests/s; ``runs``: (share, arm) → run."""

    capacity: dict[str, float]
    rates: dict[int, float]
    runs: dict[tuple[int, str], LoadRun]


def run_poisson(arms: LoadArms, text: Sequence[int], seed: int, seconds: float, progress: Progress) -> PoissonRuns:
    """The same requests at the same times for both arms; ``seconds``: of arrivals at each rate."""
    task = progress.add_task("Poisson arrivals", total=len(ARMS) * (1 + len(SHARES)))
    found = {}
    for arm in ARMS:
        arms.closed(arm, requests(text, MIX, SEQUENCES, seed))  # warm-up
        found[arm.name] = capacity(arms.closed(arm, requests(text, MIX, CAPACITY_REQUESTS, seed + 1)).served, SEQUENCES)
        progress.advance(task)
    rates = {share: found[ARMS[0].name] * share / 100 for share in SHARES}
    runs = {}
    for number, (share, rate) in enumerate(rates.items()):
        planned = with_arrivals(requests(text, MIX, max(2, round(rate * seconds)), seed + 2 + number), rate, seed)
        for arm in ARMS if number % 2 else ARMS[::-1]:
            runs[share, arm.name] = arms.open(arm, planned)
            progress.advance(task)
    return PoissonRuns(found, rates, runs)


def report_poisson(measured: PoissonRuns, report: Report, console: Console) -> None:
    """A row for each rate and arm; `itl_p99_over_p50_at_80` of TIDE, and how its latencies compare at each rate."""
    table = Table(
        title=f"Poisson arrivals: prompts of {MIX.prompt[0]}–{MIX.prompt[1]} tokens, {MIX.new[0]}–{MIX.new[1]} new tokens",
        caption="Load: share of TIDE's capacity, and of the arm's own. Percentiles: p50 / p95 / p99.",
    )
    for heading in ("load", "own load", "requests/s", "arm", "weights", "requests", "TTFT, ms", "between tokens, ms", "tokens/s"):
        table.add_column(heading, justify="left" if heading in ("arm", "weights") else "right")
    for name, value in measured.capacity.items():
        report.add(f"capacity_{name}", value)
    for (share, name), run in sorted(measured.runs.items()):
        arm = next(arm for arm in ARMS if arm.name == name)
        row, own = latency_row(run), measured.rates[share] / measured.capacity[name]
        place = {"part": "poisson", "share": share, "rate": measured.rates[share], "own_load": own}
        report.rows.append(place | {"arm": name, "title": arm.title, "weights": arm.weights} | row)
        latencies = [" / ".join(f"{row[f'{kind}_ms_p{q}']:.0f}" for q in PERCENTILES) for kind in ("ttft", "itl")]
        load = [f"{share}%", f"{own:.0%}", f"{measured.rates[share]:.2f}"]
        table.add_row(*load, arm.title, arm.weights, f"{row['requests']:.0f}", *latencies, f"{row['tokens_per_s']:.0f}")
    console.print(table)
    tide, llamacpp = (arm.name for arm in ARMS)
    report.add("capacity_vs_llamacpp", measured.capacity[tide] / measured.capacity[llamacpp])
    for share in measured.rates:
        ours, theirs = (latency_row(measured.runs[share, name]) for name in (tide, llamacpp))
        report.add(f"itl_p99_over_p50_at_{share}", ours["itl_ms_p99"] / ours["itl_ms_p50"])
        report.add(f"llamacpp_itl_p99_over_p50_at_{share}", theirs["itl_ms_p99"] / theirs["itl_ms_p50"])
        report.add(f"ttft_p95_vs_llamacpp_at_{share}", theirs["ttft_ms_p95"] / ours["ttft_ms_p95"])
