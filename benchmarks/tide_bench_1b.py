"""tide-bench on random weights in the shapes of a 1.1B Llama: what every arm costs at real sizes.

    python -m benchmarks.tide_bench_1b --prepare          # weights and graphs, which are kept: some 8 minutes
    python -m benchmarks.tide_bench_1b                    # some 20 minutes more
    python -m benchmarks.tide_bench_1b --model demo       # the same in small, to see that it runs

Random weights have no useful exits. The stub exit stands after a quarter of the layers and never passes its threshold: `exit`,
and `exact` at batch 1, show what evaluating exits in vain costs (at larger batches `exact` evaluates only exits that the
calibration expects to pay off), and static skip runs all layers but one. Two such models fit into 24 GB at
once: arms meet `full` one after the other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from tide_bench.build_cache import cached_folder, files_digest
from tide_bench.config import BenchConfig
from tide_bench.in_process import run_in_process
from tide_bench.stub_exits import with_exits
from tide_calibrate.costs.measure import measure_costs
from tide_runtime import ThreadOptions
from tide_runtime.bundle.manifest import MANIFEST_NAME, read_manifest

from benchmarks.arms.policy_arms import NEVER_SURE
from benchmarks.models.model_folders import MODELS
from benchmarks.models.quarter_cut import quarter_cut
from benchmarks.policies_cpu import CACHE

PROMPTS, ROUNDS = 16, 4
KEPT = ("unsplit", "static-skip", "genai")  # arms whose graphs are kept between runs


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "1b",
    vs: Annotated[str, typer.Option(help="Other ways to run the model.")] = ",".join(BenchConfig().rivals),
    minutes: Annotated[float, typer.Option(help="Time for all turns together, but for three of each arm.")] = 3,
    prepare: Annotated[bool, typer.Option("--prepare", help="Make what the arms load, and take one short turn.")] = False,
    cache: Annotated[Path, typer.Option(help="Where weights and graphs are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.")] = None,
) -> None:
    """Export the model when need be, and compare."""
    shapes, folder = MODELS[model], cache / model
    cut, place = quarter_cut(shapes, cache)
    key = files_digest([cut / MANIFEST_NAME])
    bundle = cached_folder(folder / "never_sure", key, lambda empty: run_in_process(_never_sure, cut, place, empty))
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"ids": {ids}}}\n' for ids in shapes.prompts(PROMPTS, shapes.prompt_tokens)), encoding="utf-8")
    command = [sys.executable, "-m", "tide_bench.cli", str(bundle), "--model", str(shapes.weights(cache))]
    command += ["--prompts", str(prompts), "--minutes", str(minutes), "--cache", str(folder / "tide-bench")]
    command += ["--prompt-tokens", str(shapes.prompt_tokens), "--new-tokens", str(shapes.new_tokens)]
    short = ["--vs", ",".join(KEPT), "--mode", "prefill", "--batch", "1", "--rounds", "1"]
    command += short if prepare else ["--vs", vs, "--rounds", str(ROUNDS)]
    raise typer.Exit(subprocess.run([*command, *(["--json", str(json)] if json else [])]).returncode)


def _never_sure(cut: Path, place: int, folder: Path) -> None:
    """The bundle ``cut`` once more in ``folder``, its files the same ones, with an exit at ``place`` that is never sure."""
    shutil.copytree(cut, folder, copy_function=os.link, ignore=shutil.ignore_patterns(MANIFEST_NAME), dirs_exist_ok=True)
    costs = measure_costs(cut, seqs=dict.fromkeys((1, 8), (1, 2, 4)), threads=ThreadOptions(shared=True))
    manifest = with_exits(read_manifest(cut), [place], costs, NEVER_SURE, NEVER_SURE)
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
