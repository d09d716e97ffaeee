"""A model that barely fits: load time, memory and decode speed of a 7B in 4 bits, against llama.cpp on the same file in turn.

    python -m benchmarks.large_model                 # 10 minutes on 2 cores, 12 GB of free memory, 20 GB of disk in --folder
    python -m benchmarks.large_model --shape 05b     # a look at the rest of it

The file has random weights in the shape of Qwen2.5 7B, in Q4_0. Memory is what only the process has (RssAnon), keys and values
included: pages of mapped files, which the system takes back when it needs them, are not in it. The first load packs the weights
into the machine's cache, which lies below --folder here; later ones map them. llama.cpp is the wheel xllamacpp.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Annotated

import numpy as np
import typer
from tide_bench.arms import OTHER_ARMS, ArmSpec
from tide_bench.build_cache import run_in_process
from tide_bench.report import Report
from tide_runtime.bundle.manifest import read_manifest

from benchmarks.arms.plans import Plan, PlannedPlace, PlanRun, add_plan_tables, pair_ratios
from benchmarks.export_scale import GIB, anonymous_bytes, measured_bytes
from benchmarks.models.random_gguf import SHAPES, random_model

_SLOTS, _TOKENS = 1024, 16
_PROMPT = 64
PLAN = Plan(
    arms=(ArmSpec("source", "TIDE source", "tide", "rounded"), OTHER_ARMS["llamacpp"]),
    places=(PlannedPlace("b1", 1, _PROMPT),),
    pairs=(("source", "llamacpp"),),
    pivot="source",
    new_tokens=32,
)


def load_and_generate(bundle: Path, vocabulary: int) -> dict[str, float]:
    """Seconds to load ``bundle``, and anonymous memory in GiB after the load and after some tokens."""
    from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

    options = EngineOptions(threads=ThreadOptions(shared=True), prefix_cache=False, verify=False, policy="full", max_batch=1)
    before, start = anonymous_bytes(os.getpid()), perf_counter()
    with Engine.load(bundle, options, device="cpu") as engine:
        found = {"load_s": perf_counter() - start, "loaded_gib": (anonymous_bytes(os.getpid()) - before) / GIB}
        engine.generate(prompts(1, _PROMPT, vocabulary), GenerationParams(max_new_tokens=_TOKENS, ignore_eos=True))
        return {**found, "anonymous_gib": (anonymous_bytes(os.getpid()) - before) / GIB}


def prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Random token ids [count][tokens]."""
    return np.random.default_rng(0).integers(0, vocabulary, (count, tokens)).tolist()


def main(
    shape: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "7b",
    minutes: Annotated[float, typer.Option(help="Time for the turns; making the model comes on top.")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each arm at most.")] = 8,
    folder: Annotated[Path, typer.Option(help="Where file, bundle and cache lie until it ends.")] = Path("build"),
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Measure a large model on this machine's CPU."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"shape {shape}; choose from: {', '.join(SHAPES)}")
    report = Report("large_model", shape=shape, minutes=minutes, rounds=rounds)
    with random_model(shape, SHAPES[shape], folder, _SLOTS) as model:
        file, bundle, vocabulary = model.file, model.bundle, SHAPES[shape].vocab
        first, later = (run_in_process(load_and_generate, bundle, vocabulary) for _ in range(2))
        folders = {"tide": bundle, "llamacpp": file}
        run = PlanRun(
            PLAN,
            read_manifest(bundle),
            lambda process: folders.get(process, bundle),
            lambda count, tokens: prompts(count, tokens, vocabulary),
            minutes,
            rounds,
        )
        run.run()
        sizes = [measured_bytes(path) for path in (bundle, model.cache / "packed", file)]
    title = f"Qwen2.5 {shape}, random, {SHAPES[shape].kind}"
    report.rows, report.settings = run.rows, report.settings | run.settings | {"first_load": first, "later_load": later}
    add_plan_tables(report, PLAN, run.rows, {"llamacpp": "llama.cpp"}, title, "Medians of rounds.")
    rows = [[name, *(f"{loaded[key]:.2f}" for key in loaded)] for name, loaded in (("first", first), ("later", later))]
    caption = "GiB: file {2:.2f}, bundle {0:.2f}, packed in the cache {1:.2f}.".format(*(size / GIB for size in sizes))
    report.table("Loads of the bundle", ["load", "seconds", "memory loaded, GiB", "after tokens, GiB"], rows, caption)
    for (_, _, baseline), ratio in pair_ratios(PLAN, run.rows).items():
        report.add(f"vs_{baseline}_{shape}_b1", ratio)
    report.add(f"anonymous_gib_{shape}", max(later["loaded_gib"], later["anonymous_gib"]))
    report.add(f"load_s_{shape}", later["load_s"])
    report.add(f"bundle_ratio_{shape}", sizes[0] / sizes[2])
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
