"""Stage 4: compute-sanitizer's four tools over the kernels' cases."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict

from tide_plugins.conformance import cases as all_cases

from benchmarks.gpu.absent_gpu import NOT_RUN as ABSENT
from benchmarks.gpu.kernel_cases import spread
from benchmarks.gpu.kit.case import Bench, Figures, KitCase, NotRun
from benchmarks.gpu.sanitize import PROGRAM, TOOLS, command, run_tool

_START_S, _CASE_S = 15.0, 0.2  # Python under a sanitizer, and a case


def cases(bench: Bench) -> Iterator[KitCase]:
    specs = list(all_cases())
    for tool, (_, most) in TOOLS.items():
        seconds = _START_S + _CASE_S * len(spread(specs, most))
        yield KitCase(
            tool,
            seconds,
            lambda tool=tool: _run(tool, bench),  # type: ignore[misc]
            lambda tool=tool: _prepare(tool, bench),  # type: ignore[misc]
            limit=100,
        )


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
    assert done.returncode == ABSENT, f"exit code {done.returncode}: {done.stderr[-1000:]}"
    return {"command": shlex.join(full), "program": done.stderr.strip().splitlines()[-1]}
