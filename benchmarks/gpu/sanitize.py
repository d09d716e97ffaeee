"""The kernels' cases under NVIDIA's compute-sanitizer: memcheck (accesses out of bounds) and racecheck (shared-memory races).

A log per tool and summary.json go to ``--out``. Without a GPU or without compute-sanitizer nothing runs (exit code 2).
Source: https://docs.nvidia.com/compute-sanitizer/.
"""

from __future__ import annotations

import json as json_text
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from tide_runtime.errors import TargetError

from benchmarks.gpu.absent_gpu import NOT_RUN, say_not_run
from benchmarks.gpu.gpu import Gpu
from benchmarks.gpu.gpu_report import gpu_report

TOOLS = ("memcheck", "racecheck")
_FOUND = 99  # what compute-sanitizer exits with when it found something


@dataclass(frozen=True)
class ToolRun:
    """``verdict``: clean, errors (the tool's), or broken (the program failed by itself)."""

    tool: str
    verdict: str
    exit_code: int
    log: str


def command(tool: str, log: Path, only: str) -> list[str]:
    """What is run: one launch of each case under ``tool``."""
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(_FOUND), "--log-file", str(log)]
    more = ["--padding", "32"] if tool == "memcheck" else ["--racecheck-report", "all"]
    cases = [sys.executable, "-m", "benchmarks.gpu.kernel_cases", "--repeats", "1", "--only", only]
    return [*sanitizer, *more, *cases]


def run_tool(tool: str, folder: Path, only: str) -> ToolRun:
    """Run the cases under one tool; its log is ``folder/TOOL.log``."""
    log = folder / f"{tool}.log"
    done = subprocess.run(command(tool, log, only), check=False)
    verdict = {0: "clean", _FOUND: "errors"}.get(done.returncode, "broken")
    return ToolRun(tool, verdict, done.returncode, log.name)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the logs and summary.json.")] = Path("build/gpu-check"),
    tools: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(TOOLS),
    only: Annotated[str, typer.Option(help="Cases whose kernel or name contains this text.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Exit code 0: clean; 1: a tool found something, or the cases fail; 2: not run."""
    try:
        name = Gpu().driver.name
        if shutil.which("compute-sanitizer") is None:
            raise TargetError("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    except TargetError as reason:
        commands = "\n".join("  " + shlex.join(command(tool, out / f"{tool}.log", only)) for tool in tools.split(","))
        say_not_run(reason, f"these commands were not run:\n{commands}")
    out.mkdir(parents=True, exist_ok=True)
    runs = [run_tool(tool, out, only) for tool in tools.split(",")]
    (out / "summary.json").write_text(json_text.dumps({"gpu": name, "runs": [asdict(run) for run in runs]}, indent=2) + "\n")
    for run in runs:
        print(f"{run.tool}: {run.verdict} ({out / run.log})")
    report = gpu_report("sanitize", name, tools=tools, only=only)
    for run in runs:
        report.rows.append(asdict(run))
        report.add(f"{run.tool}_clean", run.verdict == "clean")
    report.finish(json)
    raise typer.Exit(_exit_code(runs))


def _exit_code(runs: Sequence[ToolRun]) -> int:
    if any(run.exit_code == NOT_RUN for run in runs):
        return NOT_RUN
    return 0 if all(run.verdict == "clean" for run in runs) else 1


if __name__ == "__main__":
    typer.run(main)
