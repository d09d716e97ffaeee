"""Everything that only a GPU can tell: this repository's own commands in turn, each within a time limit. See docs/gpu.md.

    python3 bench/benchmarks/gpu/kit.py --dry-run                # without a GPU: the same commands, small, on the processor
    python3 bench/benchmarks/gpu/kit.py --json kit.json          # on the GPU, in the repository's root; within 8 minutes
    python3 bench/benchmarks/gpu/kit.py --stages kernels,demo    # stages whose names begin so

A command that fails or hangs costs only itself. Nothing has to be installed: the repository is put on the path.
"""

from __future__ import annotations

import json as json_module
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (".", "runtime", "calibrate", "plugins", "bench", "tests")
PYTHON = "python"
DEMO = "examples/demo_model/layerskip"
WORK = "build/gpu-kit"
SHAPES = "build/shapes"
IDENTITY = (PYTHON, "-m", "benchmarks.target_identity", "--models", "demo")
KERNEL_TESTS = "tests/plugins/test_kernels_on_gpu.py"
TAIL_LINES = 40  # last lines of a command's output that the report keeps
MIN_S = 5.0  # seconds; a stage with less time left is skipped


@dataclass(frozen=True)
class Stage:
    """``limit``: in seconds; ``dry``: options added where there is no GPU, None: the stage is left out there."""

    name: str
    command: tuple[str, ...]
    limit: float
    dry: tuple[str, ...] | None = ()


def _export(name: str, source: str, limit: float, *options: str, dry: tuple[str, ...] | None = ()) -> Stage:
    command = (PYTHON, "-m", "tide_export.cli", source, "--out", f"{WORK}/{name}", "--force")
    return Stage(f"{name}_export", (*command, "--target", "cpu", "--target", "torch", *options), limit, dry)


def _bench(name: str, model: str, limit: float, *options: str, dry: bool = True) -> Stage:
    command = (
        f"{PYTHON} -m tide_bench.cli {WORK}/{name} --model {model} --target torch --policy full,exact --json {WORK}/{name}.json"
    )
    small = "--device cpu --vs eager --rounds 1 --new-tokens 4 --batch 1"
    arms = ("--device", "cuda", "--vs", "eager,cuda-graph,compile")
    return Stage(name, (*command.split(), *arms, *options), limit, tuple(small.split()) if dry else None)


def _shapes(name: str, limit: float, *options: str) -> Stage:
    """What `benchmarks.gpu.shapes` prepared at home and the tree carries."""
    command = (PYTHON, "-m", "benchmarks.gpu.shapes", f"{SHAPES}/{name}.tgz", "--json", f"{WORK}/{name}.json")
    return Stage(name, (*command, *options), limit, None)


def _sanitized(tool: str) -> Stage:
    options = ("--tool", tool, "--launch-timeout", "0", "--error-exitcode", "99", "--report-api-errors", "no")
    return Stage(tool, ("compute-sanitizer", *options, PYTHON, "-m", "pytest", "-q", "-x", KERNEL_TESTS), 75, None)


STAGES = (
    Stage("doctor", (PYTHON, "-m", "tide_runtime.cli.doctor"), 60),
    Stage("kernels", (PYTHON, "-m", "pytest", "-q", KERNEL_TESTS), 60),
    Stage("memory", (PYTHON, "-m", "pytest", "-q", "tests/runtime/backends/device/test_growing_memory.py"), 60),
    *(_sanitized(tool) for tool in ("memcheck", "racecheck")),
    _export("demo_fp16", DEMO, 90, "--dtype", "fp16", "--max-seq-len", "512", dry=("--dtype", "fp32")),
    _bench("demo_fp16", DEMO, 150),
    Stage("demo_fp32", (*IDENTITY, "--texts", "16", "--device", "cuda"), 120, None),
    _export("demo_int4", DEMO, 90, "--dtype", "fp16", "--weights", "int4", "--max-seq-len", "512", dry=None),
    _bench("demo_int4", DEMO, 90, "--vs", "eager", dry=False),
    Stage("operators", (PYTHON, "-m", "benchmarks.gpu.operators", "--json", f"{WORK}/operators.json"), 120, None),
    _shapes("1b", 90),
    _shapes("8b", 120, "--batch", "1,8,32", "--context", "128,3000"),
    _shapes("8b-int4", 60),
)


def environment(work: Path) -> dict[str, str]:
    """Variables with which child processes import this repository, and find its entry points: the kernels are among them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = work / "metadata" / "tide_llm-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = list[str]()
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    places = [*(str(ROOT / folder) for folder in FOLDERS), str(folder.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(place for place in places if place)}


def run(stage: Stage, limit: float, dry: bool, variables: dict[str, str]) -> dict[str, Any]:
    """The stage's row: its state (passed, failed or stopped), seconds, and the end of its output."""
    begun = monotonic()
    command = [sys.executable if word == PYTHON else word for word in (*stage.command, *(stage.dry or () if dry else ()))]
    if shutil.which(command[0]) is None:
        return {"stage": stage.name, "state": "left", "seconds": 0.0, "output": [f"{command[0]} is not on the PATH"]}
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True, **output) as process:
        try:
            text, _ = process.communicate(timeout=limit)
            state = "passed" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and all that it started
            text = process.communicate()[0]
            state = "stopped"
    tail = text.splitlines()[-TAIL_LINES:]
    return {"stage": stage.name, "state": state, "seconds": round(monotonic() - begun, 1), "output": tail}


def rows_of(stages: Sequence[Stage], seconds: float, dry: bool) -> Iterator[dict[str, Any]]:
    """A row for each stage, until the time is over."""
    end = monotonic() + seconds
    variables = environment(ROOT / WORK)
    for stage in stages:
        left = end - monotonic()
        if (dry and stage.dry is None) or left < MIN_S:
            yield {"stage": stage.name, "state": "left", "seconds": 0.0, "output": []}
        else:
            yield run(stage, min(left, 900 if dry else stage.limit), dry, variables)


def chosen(names: str) -> list[Stage]:
    """The stages whose names begin with one of the comma-separated ``names``; all without any. Raises ValueError."""
    wanted = tuple(name for name in names.split(",") if name)
    if unknown := [name for name in wanted if not any(stage.name.startswith(name) for stage in STAGES)]:
        raise ValueError(f"there is no stage {', '.join(unknown)}; choose from: {', '.join(stage.name for stage in STAGES)}")
    return [stage for stage in STAGES if not wanted or stage.name.startswith(wanted)]


def report_rows(rows: Sequence[dict[str, Any]], json: Path | None) -> None:
    """The report: a table of the stages, and the tables that `tide-bench` made."""
    from tide_bench.report import Report
    from tide_bench.tables import Table
    from tide_runtime.targets.gpu_probe import present_gpu

    report = Report("gpu_kit")
    gpu = present_gpu(0)
    report.machine |= {"gpu": gpu.name if gpu is not None else "none"}
    report.rows = list(rows)
    cells = [[row["stage"], row["state"], f"{row['seconds']:.0f}"] for row in rows]
    report.table("The GPU kit", ["stage", "result", "seconds"], cells)
    for row in rows:
        file = ROOT / WORK / f"{row['stage']}.json"
        if row["state"] == "passed" and file.exists():
            report.tables += [Table(**table) for table in json_module.loads(file.read_text(encoding="utf-8"))["tables"]]
    for state in ("passed", "failed", "stopped", "left"):
        report.add(f"kit_{state}", sum(row["state"] == state for row in rows))
    report.finish(json)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: no stage failed; 1: some did."""
    import argparse

    parser = argparse.ArgumentParser(description="Run this repository's commands on a GPU.")
    parser.add_argument("--stages", default="", help="beginnings of stages' names, separated by commas; default: all")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all stages; what does not fit is left")
    parser.add_argument("--dry-run", action="store_true", help="small, on the processor; stages that need a GPU are left")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    given = parser.parse_args(argv)
    try:
        stages = chosen(given.stages)
    except ValueError as error:
        parser.error(str(error))
    sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]
    rows = list[dict[str, Any]]()
    for row in rows_of(stages, 3600.0 if given.dry_run else given.seconds, given.dry_run):
        rows.append(row)
        print(f"{row['stage']:<18} {row['state']:<8} {row['seconds']:6.1f} s", flush=True)
        if row["state"] in ("failed", "stopped"):
            print("\n".join(row["output"]), flush=True)
    report_rows(rows, given.json)
    return int(any(row["state"] in ("failed", "stopped") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
