"""Parts `prefill` and `idle` of engine_load: prompts that are read together, a warm prefix, an idle engine, Python in a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tide_bench.paired_ratio import paired_ratio
from tide_bench.report import Report
from tide_bench.rounds import SETTLE_S

from benchmarks.serving.closed_part import GENAI
from benchmarks.serving.load_arms import LoadArm, LoadArms
from benchmarks.serving.workload import LengthMix, requests

PREFILL_ROUNDS, WARM_ROUNDS = 12, 6
PREFIX_TOKENS, QUESTION_TOKENS = 900, 16
IDLE_S = 10.0
_INT4, _FP32 = (LoadArm("tide", f"TIDE {weights}", weights, 8) for weights in ("int4", "fp32"))
_GENAI = LoadArm("genai-batch", "genai Generator, one batch", GENAI, 8)
PREFILL_ARMS, IDLE_ARMS = (_INT4, _GENAI), (_INT4, _FP32)


def run_prefill(arms: LoadArms, text: Sequence[int], seed: int, report: Report, console: Console, progress: Progress) -> None:
    """`prefill8_vs_genai`: speed of eight 64-token prompts to their first tokens. `warm_over_cold`: time to first token behind a
    prefix of 900 tokens that another request has left in the prefix cache, over that of the same prompt with another salt."""
    tide, genai = arms.process(_INT4), arms.process(_GENAI)
    task = progress.add_task("first tokens", total=PREFILL_ROUNDS + WARM_ROUNDS)
    ours, theirs = [], []
    for number in range(1 + PREFILL_ROUNDS):
        prompts = [one.prompt for one in requests(text, LengthMix((64, 64), (1, 1)), 8, seed + number)]
        times = {}
        for arm in (_INT4, _GENAI) if number % 2 else (_GENAI, _INT4):
            time.sleep(SETTLE_S)
            times[arm] = tide.call("first_tokens", prompts) if arm is _INT4 else genai.generate(prompts, 1).first_token_s
        if number:  # the first round is a warm-up
            ours.append(times[_INT4])
            theirs.append(times[_GENAI])
            progress.advance(task)
    prefill = paired_ratio(theirs, ours)
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
    warm_over_cold = median(w / c for w, c in zip(warm, cold, strict=True))
    table = Table("", "ms", title="Time to first tokens (medians)")
    figures = {
        "8 prompts of 64 tokens, TIDE int4": ours,
        f"the same, genai ({GENAI})": theirs,
        f"{PREFIX_TOKENS} + {QUESTION_TOKENS} tokens, cold, TIDE int4": cold,
        "the same behind a warm prefix": warm,
    }
    for title, seconds in figures.items():
        table.add_row(title, f"{1e3 * median(seconds):.0f}")
        report.rows.append({"part": "prefill", "title": title, "ms": 1e3 * median(seconds), "rounds": len(seconds)})
    console.print(table)
    report.add("prefill8_vs_genai", prefill.median)
    report.add("warm_over_cold", warm_over_cold)


def run_idle(arms: LoadArms, text: Sequence[int], seed: int, report: Report, console: Console, progress: Progress) -> None:
    """`idle_cpu_pct`: CPU time of an engine's process without requests, over one core. `python_per_step_pct`: the share of a
    decode step of 8 sequences outside sessions."""
    task = progress.add_task("idle CPU and Python in a step", total=3)
    table = Table("", "a step, ms", "in Python, ms", "share", title="Decode steps of 8 sequences, each streamed to a thread")
    for arm in IDLE_ARMS:
        measured = arms.process(arm).call("step_time", requests(text, LengthMix((64, 64), (96, 96)), 8, seed))
        suffix = "" if arm is _INT4 else f"_{arm.weights}"
        report.add(f"python_per_step_pct{suffix}", measured.python_pct)
        report.rows.append({"part": "idle", "title": arm.title, "step_ms": measured.step_ms, "python_ms": measured.python_ms})
        table.add_row(arm.title, f"{measured.step_ms:.1f}", f"{measured.python_ms:.2f}", f"{measured.python_pct:.1f}%")
        progress.advance(task)
    report.add("idle_cpu_pct", 100 * arms.process(_INT4).call("idle_cpu", IDLE_S) / IDLE_S)
    progress.advance(task)
    console.print(table)
