"""Part `closed` of engine_load: clients that send their next request after an answer, all arms in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from statistics import median
from time import monotonic

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tide_bench.load import Request
from tide_bench.report import Report

from benchmarks.serving.clients import LoadRun
from benchmarks.serving.latency import latency_row, speed_ratio
from benchmarks.serving.load_arms import LoadArm, LoadArms
from benchmarks.serving.workload import LengthMix, requests

MIX = LengthMix(prompt=(64, 64), new=(64, 64))
Q4_1, GENAI = "Q4_1 of the GGUF file", "int4 by genai's builder"
FEWEST_ROUNDS = 3


def _tide(weights: str, clients: int) -> LoadArm:
    return LoadArm("tide", f"TIDE {weights}, submit", weights, clients)


def _llamacpp(clients: int) -> LoadArm:
    return LoadArm("llamacpp", "llama.cpp server", Q4_1, clients)


def _genai(clients: int) -> LoadArm:
    return LoadArm("genai-engine", "genai Engine, static batches", GENAI, clients)


# Arms whose ratios are results run in the same rounds. Share of the time → arms.
GROUPS: tuple[tuple[float, tuple[LoadArm, ...]], ...] = (
    (
        0.6,
        (
            *(_tide(weights, clients) for weights in ("fp32", "int4") for clients in (1, 8)),
            LoadArm("generate", "TIDE fp32, one generate call", "fp32", 8),
            _llamacpp(1),
            _llamacpp(8),
            LoadArm("genai-batch", "genai Generator, one batch", GENAI, 8),
            _genai(8),
        ),
    ),
    (0.4, (_tide("fp32", 32), _tide("int4", 32), _llamacpp(32), _genai(32))),
)
ARMS = tuple(arm for _, group in GROUPS for arm in group)
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


def run_closed(arms: LoadArms, text: Sequence[int], seed: int, minutes: float, progress: Progress) -> list[dict[str, LoadRun]]:
    """Rounds of every group of arms, until its share of ``minutes`` is over. In a round all arms answer the same prompts, in an
    order of the round's own; no prompt comes twice."""
    rounds = []
    for number, (share, group) in enumerate(GROUPS):
        seconds = 60 * minutes * share
        task = progress.add_task(f"closed loop, {max(arm.clients for arm in group)} clients", total=seconds)
        for arm in group:
            arms.closed(arm, _prompts(text, arm, [seed, number, 0]))  # warm-up
        begin, done = monotonic(), 0
        while done < FEWEST_ROUNDS or monotonic() - begin < seconds:
            done += 1
            order = Random(f"{seed} {number} {done}").sample(group, len(group))
            rounds.append({arm.name: arms.closed(arm, _prompts(text, arm, [seed, number, done])) for arm in order})
            progress.update(task, completed=min(seconds, monotonic() - begin))
        progress.update(task, completed=seconds)
    return rounds


def _prompts(text: Sequence[int], arm: LoadArm, seed: Sequence[int]) -> list[Request]:
    return requests(text, MIX, max(2, arm.clients), seed)  # two requests of a lone client: a second or two


def report_closed(rounds: Sequence[Mapping[str, LoadRun]], report: Report, console: Console) -> None:
    """Tables of arms and ratios, and their results."""
    table = Table(
        title="Closed loop: SmolLM2-135M-Instruct, 64-token prompts, 64 new tokens, greedy",
        caption="Medians of rounds. Client CPU: the clients' process, over one core. TIDE's clients are threads of its process.",
    )
    for heading in ("clients", "arm", "weights", "tokens/s", "TTFT p50, ms", "between tokens p50, ms", "client CPU", "rounds"):
        table.add_column(heading, justify="left" if heading in ("arm", "weights") else "right")
    for arm in sorted(ARMS, key=lambda arm: arm.clients):
        runs = [one[arm.name] for one in rounds if arm.name in one]
        if not runs:
            continue
        rows = [latency_row(run) for run in runs]
        row = {name: median(one[name] for one in rows) for name in rows[0]}
        cpu = median(run.client_cpu_s / run.seconds for run in runs)
        own_process = arm.kind == "llamacpp"
        report.rows.append(
            {"part": "closed", "arm": arm.name, "title": arm.title, "weights": arm.weights, "clients": arm.clients, **row}
            | {"rounds": len(runs), "speeds": [run.tokens_per_s for run in runs]}
            | ({"client_cpu": cpu} if own_process else {})
        )
        report.add(f"tokens_per_s_{arm.name}", row["tokens_per_s"])
        cells = [str(arm.clients), arm.title, arm.weights, f"{row['tokens_per_s']:.0f}", f"{row['ttft_ms_p50']:.0f}"]
        whole = arm.kind in ("generate", "genai-batch")  # their tokens come all at once
        table.add_row(*cells, "" if whole else f"{row['itl_ms_p50']:.1f}", f"{cpu:.1%}" if own_process else "", str(len(runs)))
    console.print(table)
    compared = Table("result", "arm over baseline", "median (95%)", title="Ratios of tokens/s, paired by round")
    for name, (arm_name, baseline) in RATIOS.items():
        ratio = speed_ratio(rounds, arm_name, baseline)
        if ratio is not None:
            report.add(name, ratio.median)
            compared.add_row(name, f"{arm_name} / {baseline}", f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})")
    console.print(compared)
