"""tide-bench on random weights in the shapes of a 1.1B Llama: what every arm costs at real sizes.

    python -m benchmarks.tide_bench_1b                             # 20 GB of memory, some 40 minutes
    python -m benchmarks.tide_bench_1b --vs unsplit,eager --minutes 2

Random weights have no exits worth asking, so `exit` and static skip are left out; `exact` copies. Prompts are random ids.
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

MODEL = MODELS["1b"]
PROMPTS = 24
SLOTS = 256


def main(
    vs: Annotated[str, typer.Option(help="Other ways to run the model.")] = "eager,compile,unsplit,genai,prompt-lookup",
    minutes: Annotated[float, typer.Option(help="Time for all turns together.")] = 20,
    cache: Annotated[Path, typer.Option(help="Where weights and graphs are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.")] = None,
) -> None:
    """Export the model when need be, and compare."""
    weights = MODEL.weights(cache)
    bundle = export_bundle(weights, MODEL.identity(), cache / "1b" / "tide_bench", max_seq_len=SLOTS)
    prompts = cache / "1b" / "prompts.jsonl"
    prompts.write_text("".join(f'{{"ids": {ids}}}\n' for ids in MODEL.prompts(PROMPTS, MODEL.prompt_tokens)), encoding="utf-8")
    command = [sys.executable, "-m", "tide_bench.cli", str(bundle), "--model", str(weights), "--prompts", str(prompts)]
    command += ["--vs", vs, "--policy", "full,exact", "--minutes", str(minutes), "--cache", str(cache / "1b" / "tide-bench")]
    command += ["--prompt-tokens", str(MODEL.prompt_tokens), "--new-tokens", str(MODEL.new_tokens), "--rounds", "6"]
    raise typer.Exit(subprocess.run([*command, *(["--json", str(json)] if json else [])]).returncode)


if __name__ == "__main__":
    typer.run(main)
