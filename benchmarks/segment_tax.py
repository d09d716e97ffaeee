"""What does cutting cost? Decoding through 1, 2, 4, 6 segments against the same through the unsplit graph.

An engine runs every layer in one graph where the bundle has one (`full`), so bundles are cut here and that graph is taken out of
their manifests: then `full` launches segment after segment, as policies that may stop in between do. "1 segment" is the unsplit
bundle once more, with its weights elsewhere in memory: how far its ratio is from 1 is how far the others may be off. Where
weights happen to lie is worth a few percent, so everything is loaded several times (``--loads``), another arm first. All arms
take turns in one process; a ratio is the median over rounds of (segments' time / unsplit's time of the same round). ``--pool
shared`` is what TIDE's commands use: one thread pool for all sessions; ``--pool own`` is the default for embedding.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from tide_bench.arms.tide import timed
from tide_bench.bundles import write_changed, write_cuts
from tide_bench.report import Report
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.manifest import UNCUT, Manifest, forms_of, read_manifest

from benchmarks.models.model_folders import BENCH_MODELS
from tide_export.load import LoadedModel

PROMPT_TOKENS = 128
SEGMENTS = (1, 2, 4, 6)
UNSPLIT = "unsplit"
BATCHES = (1, 4)  # sequences that decode together
SETTLE_S = 0.02  # threads of the arm before stop spinning


def write_even_cuts(loaded: LoadedModel, directory: Path, segment_counts: Sequence[int], max_seq_len: int) -> None:
    """A bundle ``directory``/segments_N of N even segments for each count, in fp32."""
    layers = loaded.model.config.get_text_config().num_hidden_layers
    places = {n: [str(round(i * layers / n)) for i in range(1, n)] for n in segment_counts}
    cuts = {directory / f"segments_{n}": ",".join(places[n]) or "none" for n in segment_counts}
    write_cuts(loaded, cuts, "fp32", max_seq_len)


def write_arms(model: str, directory: Path) -> dict[str, Path]:
    """Arm → its bundle, in ``directory``."""
    cut = directory / "cut"
    write_even_cuts(BENCH_MODELS[model](), cut, SEGMENTS, max_seq_len=512)
    arms = {UNSPLIT: cut / "segments_1"}
    for n in SEGMENTS:
        bundle = cut / f"segments_{n}"
        arms[str(n)] = write_changed(bundle, directory / f"segments_{n}", without_uncut(read_manifest(bundle)))
    return arms


def without_uncut(manifest: Manifest) -> Manifest:
    """``manifest`` whose targets have no graph of all segments."""
    uncut = forms_of(UNCUT)
    targets = {
        name: replace(info, graphs={graph: file for graph, file in info.graphs.items() if graph not in uncut})
        for name, info in manifest.targets.items()
    }
    return replace(manifest, targets=targets)


def measure(
    bundles: dict[str, Path], threads: ThreadOptions, turn: int, rounds: int, steps: int
) -> dict[int, dict[str, list[float]]]:
    """Batch → arm → ms per decode step in every round. The ``turn``-th arm is loaded first, as what a process loads first is some
    percent faster; the order of rounds turns, so that no arm always follows the same one."""
    names = list(bundles)
    prompt = np.random.default_rng(0).integers(3, 1000, PROMPT_TOKENS).tolist()
    options = EngineOptions(policy="full", max_batch=max(BATCHES), threads=threads, prefix_cache=False, verify=False)
    params = GenerationParams(max_new_tokens=steps + 1, ignore_eos=True)
    times: dict[int, dict[str, list[float]]] = {batch: {name: [] for name in names} for batch in BATCHES}
    with ExitStack() as stack:
        first = turn % len(names)
        engines = {
            name: stack.enter_context(Engine.load(bundles[name], options, device="cpu")) for name in names[first:] + names[:first]
        }
        for batch in BATCHES:
            for number in range(-1, rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    time.sleep(SETTLE_S)
                    ms = timed(engines[name], [prompt] * batch, params).decode_ms_per_token
                    if number >= 0:  # the first round binds buffers
                        times[batch][name].append(ms)
    return times


def main(
    models: Annotated[str, typer.Option(help=f"Of {', '.join(BENCH_MODELS)}.")] = "llama12x512,demo",
    pool: Annotated[str, typer.Option(help="shared (as TIDE's commands run) or own (as embedded by default).")] = "shared",
    loads: Annotated[int, typer.Option(min=1, help="How often everything is loaded anew, another arm first.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which every arm runs once, per load.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps per arm and round.")] = 40,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure the segment tax."""
    report = Report("segment_tax", pool=pool, loads=loads, rounds=rounds, steps=steps, prompt_tokens=PROMPT_TOKENS)
    rows = []
    for model in models.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            bundles = write_arms(model, Path(temporary))
            runs = [measure(bundles, ThreadOptions(shared=pool == "shared"), turn, rounds, steps) for turn in range(loads)]
        for batch in BATCHES:
            times = {name: np.concatenate([run[batch][name] for run in runs]) for name in bundles}
            rows.append([model, str(batch), *_record(report, model, batch, times)])
    headings = ["model", "batch", "unsplit ms", *(f"{n} segments" for n in SEGMENTS)]
    caption = f"Decoding through N segments, time over that of the unsplit graph, {pool} thread pool. llama: random weights."
    report.table("What cutting costs", headings, rows, caption)
    report.finish(json)


def _record(report: Report, model: str, batch: int, times: dict[str, np.ndarray]) -> list[str]:
    """The figures of one row, which `Report` gets too."""
    prefix = ("" if model == "llama12x512" else f"{model}_") + "segment_tax"
    base = times[UNSPLIT]
    ratios = {n: float(np.median(times[str(n)] / base)) for n in SEGMENTS}
    report.add(f"{prefix}_unsplit_ms_b{batch}", float(np.median(base)))
    for n, ratio in ratios.items():
        report.add(f"{prefix}_{n}_b{batch}", ratio)
    return [f"{np.median(base):.3f}", *(f"{ratio:.3f}" for ratio in ratios.values())]


if __name__ == "__main__":
    typer.run(main)
