"""Time and peak memory of exporting a 1.1B-parameter Llama in fp16, verification included.

python -m benchmarks.export_1b
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from tide_bench.report import Report

from benchmarks.models.model_folders import CACHE, llama_1b


def main(
    dtype: Annotated[str, typer.Option(help="fp16 or fp32.")] = "fp16",
    cache: Annotated[Path, typer.Option(help="Where the random weights are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Export the 1.1B model in a process of its own and report what it took."""
    weights = llama_1b(cache)
    report = Report("export_1b", dtype=dtype)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        begin = time.perf_counter()
        command = [sys.executable, "-m", "tide_export.cli", str(weights), "--out", f"{folder}/engine", "--dtype", dtype]
        done = subprocess.run(command)
        seconds = time.perf_counter() - begin
    if done.returncode:
        raise typer.Exit(done.returncode)
    report.add(f"export_1b_{dtype}_seconds", seconds)
    report.add(f"export_1b_{dtype}_peak_gib", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
