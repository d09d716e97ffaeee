"""`make demo-exits`: calibrate and export a model that was trained to exit early, let it write code, compare ways to run it.

python examples/demo_exits.py [--model layerskip|stock|looped] [--out engine/]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "build" / "demo-data"
PROMPT_FILE = DATA / "copy.py"  # the model was not trained on it
PROMPT_LINES = 20  # from the first import on

console = Console()


def main(
    model: Annotated[str, typer.Option(help="Which demo model: layerskip, stock or looped.")] = "layerskip",
    out: Annotated[Path, typer.Option(help="Where the bundle goes; replaced when it is one.")] = ROOT / "engine-exits",
    new_tokens: Annotated[int, typer.Option(help="Tokens to write, and to time.")] = 96,
) -> None:
    """Calibrate, export, generate, compare."""
    source = ROOT / "examples" / "demo_model" / model
    calibration = out.with_name(f"{out.name}-calibration")
    _run("1. Calibrate: where may tokens stop?", "examples.demo_data", str(DATA))
    _run(
        "",
        "tide_calibrate.cli",
        str(source),
        "--data",
        str(DATA),
        "--out",
        str(calibration),
        "--heads",
        "identity,linear,tail:1",
        "--force",
    )
    _run("2. Export", "tide_export.cli", str(source), "--out", str(out), "--calibration", str(calibration), "--force")
    _run("3. What is in the bundle", "tide_runtime.cli.inspect", str(out))
    prompt = _prompt(PROMPT_FILE.read_text(encoding="utf-8"))
    console.rule("4. The model goes on writing")
    console.print(prompt, style="dim", end="", markup=False, highlight=False)
    _run(
        "",
        "tide_runtime.cli.run",
        str(out),
        prompt,
        "--max-new-tokens",
        str(new_tokens),
        "--temperature",
        "0.7",
        "--seed",
        "1",
        "--stats",
    )
    _run(
        "5. The policies, and other ways to run every layer",
        "tide_bench.cli",
        str(out),
        "--vs",
        "eager,unsplit",
        "--batch",
        "1",
        "--new-tokens",
        str(new_tokens),
        "--minutes",
        "0.5",
    )


def _prompt(source: str) -> str:
    """The beginning of a module's code, after its docstring."""
    lines = source.splitlines(keepends=True)
    begin = next(number for number, line in enumerate(lines) if line.startswith("import "))
    return "".join(lines[begin : begin + PROMPT_LINES])


def _run(title: str, module: str, *arguments: str) -> None:
    if title:
        console.rule(title)
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    typer.run(main)
