"""The kernels' cases under NVIDIA's compute-sanitizer. Source: https://docs.nvidia.com/compute-sanitizer/.

memcheck    accesses out of bounds or misaligned
racecheck   shared-memory races
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tide_runtime.errors import TargetError

from benchmarks.gpu.absent_gpu import NOT_RUN
from benchmarks.gpu.kit.case import Bench, Figures, KitCase, NotRun

PROGRAM = "compute-sanitizer"
# Tool → its own options, and how many cases of each kernel it gets: shadow memory makes racecheck slow. memcheck
# would count errors that cuda.core handles itself, such as calls which an older driver lacks (cuda-python pull request 687).
TOOLS: dict[str, tuple[tuple[str, ...], int]] = {
    "memcheck": (("--padding", "32", "--report-api-errors", "no"), 12),
    "racecheck": (("--racecheck-report", "all"), 8),
}
_FOUND = 99  # what compute-sanitizer exits with when it found something
_LAST_LINES = 30  # of a log that are kept
_REFUSALS = ("Device not supported", "Error: No attachable process", "Unable to find injection library")


@dataclass(frozen=True)
class ToolRun:
    """``verdict``: clean, errors (the tool's), refused (it runs on no such machine), or broken (the program failed by itself).

    ``severities``: how many findings of each, where the tool grades them; a finding of severity INFO is no error.
    """

    tool: str
    verdict: str
    exit_code: int
    severities: dict[str, int]
    summary: list[str]


def command(tool: str, log: Path, most: int) -> list[str]:
    """One launch of each of at most ``most`` cases of every kernel under ``tool``."""
    sanitizer = [PROGRAM, "--tool", tool, "--launch-timeout", "0", "--error-exitcode", str(_FOUND), "--log-file", str(log)]
    return [
        *sanitizer,
        *TOOLS[tool][0],
        sys.executable,
        "-m",
        "benchmarks.gpu.kernel_cases",
        "--repeats",
        "1",
        "--most",
        str(most),
    ]


def run_tool(tool: str, folder: Path) -> ToolRun:
    """Run the cases under one tool; its log is ``folder/TOOL.log``. Raises TargetError when compute-sanitizer is missing."""
    if shutil.which(PROGRAM) is None:
        raise TargetError(f"{PROGRAM} is not on the PATH; it comes with the CUDA toolkit")
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{tool}.log"
    done = subprocess.run(command(tool, log, TOOLS[tool][1]), capture_output=True, text=True, check=False)
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return judged(tool, done.returncode, text, done.stdout + done.stderr)


def judged(tool: str, exit_code: int, log: str, output: str) -> ToolRun:
    """``log``: the tool's; ``output``: the program's."""
    severities = {name: len(re.findall(rf"^=+ {name}:", log, re.MULTILINE)) for name in ("Error", "Warning", "Info")}
    if any(refusal in log + output for refusal in _REFUSALS):
        verdict = "refused"
    else:
        verdict = {0: "clean", _FOUND: "errors"}.get(exit_code, "broken")
    lines = log.splitlines()[-_LAST_LINES:] + ([] if verdict in ("clean", "errors") else output.splitlines()[-_LAST_LINES:])
    return ToolRun(tool, verdict, exit_code, severities, lines)


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    """``argument``: of `TOOLS`."""
    yield KitCase(argument, partial(_run, argument, bench), partial(_prepare, argument, bench))


def _run(tool: str, bench: Bench) -> Figures:
    if shutil.which(PROGRAM) is None:
        raise NotRun(f"{PROGRAM} is not on this machine")
    run = run_tool(tool, bench.work / "sanitizers")
    if run.verdict == "refused":
        raise NotRun(f"{PROGRAM} refuses this machine: {' | '.join(run.summary[-3:])}")
    if run.verdict != "clean":
        raise RuntimeError(f"{run.verdict}, exit code {run.exit_code}, {run.severities}:\n" + "\n".join(run.summary))
    return asdict(run)


def _prepare(tool: str, bench: Bench) -> Figures:
    """The command, of which the part that is the program's own runs: it ends before its first launch."""
    full = command(tool, bench.work / "sanitizers" / f"{tool}.log", 1)
    program = full[full.index(sys.executable) :]
    done = subprocess.run([*program, "--only", "draft_verify"], capture_output=True, text=True, check=False)
    assert done.returncode == NOT_RUN, f"exit code {done.returncode}: {done.stderr[-1000:]}"
    return {"command": shlex.join(full), "program": done.stderr.strip().splitlines()[-1]}
