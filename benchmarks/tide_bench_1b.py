"""tide-bench on random weights in the shapes of a 1.1B Llama: what every arm costs at real sizes.

    python -m benchmarks.tide_bench_1b --prepare          # weights and graphs, which are kept: some 6 minutes
    python -m benchmarks.tide_bench_1b                    # some 10 minutes more
    python -m benchmarks.tide_bench_1b --model demo       # the same in small, to see that it runs

Random weights have no exits worth asking and repeat themselves, which would be `exact`'s and prompt lookup's luck, so `full`
stands for TIDE. Two such models fit into 24 GB at once: arms meet `full` one after the other.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from tide_bench.bundles import export_bundle

from benchmarks.model_folders import MODELS
from benchmarks.policies_cpu import CACHE

PROMPTS, NEW_TOKENS, ROUNDS = 16, 8, 4
SLOTS = 256
KEPT = ("unsplit", "genai")  # arms whose graphs are kept between runs


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "1b",
    vs: Annotated[str, typer.Option(help="Other ways to run the model.")] = "unsplit,eager,compile,genai",
    minutes: Annotated[float, typer.Option(help="Time for all turns together, but for three of each arm.")] = 3,
    prepare: Annotated[bool, typer.Option("--prepare", help="Make what the arms load, and take one short turn.")] = False,
    cache: Annotated[Path, typer.Option(help="Where weights and graphs are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.")] = None,
) -> None:
    """Export the model when need be, and compare."""
    shapes, folder = MODELS[model], cache / model
    weights = shapes.weights(cache)
    bundle = export_bundle(weights, shapes.identity(), folder / "tide_bench", max_seq_len=SLOTS)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"ids": {ids}}}\n' for ids in shapes.prompts(PROMPTS, shapes.prompt_tokens)), encoding="utf-8")
    command = [sys.executable, "-m", "tide_bench.cli", str(bundle), "--model", str(weights), "--prompts", str(prompts)]
    command += ["--policy", "full", "--minutes", str(minutes), "--cache", str(folder / "tide-bench")]
    command += ["--prompt-tokens", str(shapes.prompt_tokens), "--new-tokens", str(NEW_TOKENS)]
    short = ["--vs", ",".join(KEPT), "--mode", "prefill", "--batch", "1", "--rounds", "1"]
    command += short if prepare else ["--vs", vs, "--rounds", str(ROUNDS)]
    raise typer.Exit(subprocess.run([*command, *(["--json", str(json)] if json else [])]).returncode)


if __name__ == "__main__":
    typer.run(main)
