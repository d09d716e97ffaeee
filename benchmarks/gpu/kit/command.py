"""The command line of the kit: chooses the stages that fit into a call, runs them one after the other, sums up."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tide_bench.report import machine

from benchmarks.gpu.kit.bare_image import FOLDERS, ROOT
from benchmarks.gpu.kit.case import Bench
from benchmarks.gpu.kit.journal import FAILED, NOT_RUN, PASSED, PREPARED
from benchmarks.gpu.kit.pack import archive
from benchmarks.gpu.kit.pack import pack as pack_archive
from benchmarks.gpu.kit.plan import STAGES, Stage, chosen, numbers
from benchmarks.gpu.kit.run_stage import StageRun
from benchmarks.gpu.kit.stage_files import StageFiles
from benchmarks.gpu.kit.wheel_parts import collect

OUT, WHEELS = Path("build") / "gpu-kit", Path("build") / "ort-parts"
WORK = ROOT / OUT / "work"  # journals, logs, bundles: too many files for a folder of results
_LEAST_S = 20.0  # of a call that are left for a stage to be begun
_DRY_LIMIT_S = 1800.0  # of a stage on any machine
_COLORS = {PASSED: "green", PREPARED: "green", NOT_RUN: "yellow"}


def main(
    out: Annotated[Path, typer.Option(help="Results, one file for each stage; earlier ones are gone on with.")] = OUT,
    stages: Annotated[str, typer.Option(help="Comma-separated numbers.")] = numbers(STAGES),
    minutes: Annotated[float, typer.Option(min=0.5, help="Time of this call; what does not fit is left to the next.")] = 9.0,
    again: Annotated[bool, typer.Option("--again", help="Run stages anew that have a result.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything up to the launches; needs no GPU.")] = False,
    arch: Annotated[str, typer.Option(help="The architecture that --dry-run prepares launches for.")] = "sm_90",
    wheels: Annotated[Path, typer.Option(help="Parts of onnxruntime-gpu, for stages 6 and 7.")] = WHEELS,
    report: Annotated[bool, typer.Option("--report", help="Write the results into the documentation; runs nothing.")] = False,
    pack: Annotated[Path | None, typer.Option(help="Write what has to travel to this tar file; runs nothing.")] = None,
) -> None:
    """Exit code 0: every stage that ran passed; 1: one did not; 2: nothing ran."""
    if report:
        from benchmarks.gpu.kit.report import write_report

        write_report(out)
        return
    if pack is not None:
        pack_archive(pack)
        return
    try:
        some = chosen(stages)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="gpu-kit-") as folder:
            results = Call(Path(folder), Path(folder), 60.0 * 60, again=True, dry_arch=arch).run(some)
        _print_estimates(results)
    elif (refusal := no_gpu()) is not None:
        print(f"NOT RUN: {refusal}; --dry-run does everything up to the launches")
        raise typer.Exit(2)
    else:
        print(use_wheel(wheels, WORK / "onnxruntime-gpu"))
        mirrors = (Path(os.environ["OUT"]),) if "OUT" in os.environ else ()
        results = Call(out, WORK, 60.0 * minutes, mirrors, again).run(some)
    raise typer.Exit(0 if all(result["state"] in _COLORS for result in results) else 1)


@dataclass(frozen=True)
class Call:
    """One call's runs of stages, in ``seconds`` at most.

    Args:
        out: folder of results; ``work``: of everything else; ``mirrors``: folders that get copies of results.
        again: also run stages that have a result.
        dry_arch: make a dry run for this architecture.
    """

    out: Path
    work: Path
    seconds: float
    mirrors: tuple[Path, ...] = ()
    again: bool = False
    dry_arch: str | None = None

    def run(self, some: Sequence[Stage]) -> list[dict[str, Any]]:
        """The results of the stages that ran, after a table of all."""
        end, facts, console = time.monotonic() + self.seconds, _facts(), Console(width=140, highlight=False)
        ran: dict[int, dict[str, Any]] = {}
        for stage in some:
            files, left = StageFiles(stage, self.out, self.work, self.mirrors), end - time.monotonic()
            earlier = None if self.again else _earlier(files, facts["sources"])
            if earlier is not None and earlier["complete"]:
                files.write(earlier)  # into the mirrors too: a folder of results is whole
                continue
            if left < _LEAST_S:
                break
            limit = min(stage.limit, left) if self.dry_arch is None else _DRY_LIMIT_S
            console.print(f"[bold]stage {stage.number}[/bold]: {stage.title}, {limit:.0f} s at most")
            bench = Bench(self.dry_arch or "", self.work.resolve(), self.dry_arch is not None)
            run = StageRun(files, bench, limit, facts, lambda line: console.print(line, markup=False, soft_wrap=True))
            ran[stage.number] = run.run(earlier)
        console.print(_table([StageFiles(stage, self.out, self.work) for stage in some], ran))
        return list(ran.values())


def no_gpu() -> str | None:
    """Why this machine's driver has no GPU, or None."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"there is no CUDA driver ({error})"
    status = driver.cuInit(0)
    return f"cuInit returned {status}" if status else None


def use_wheel(parts: Path, store: Path) -> str:
    """Put onnxruntime-gpu before other packages in child processes, once all its parts have come; what was done."""
    done = collect(parts, store)
    if (store / "site").exists():
        os.environ["PYTHONPATH"] = os.pathsep.join([str((store / "site").resolve()), os.environ.get("PYTHONPATH", "")])
    return done


def _earlier(files: StageFiles, sources: str) -> dict[str, Any] | None:
    """The result of an earlier call with the same sources; results of other sources do not count.

    Cases that could not run then are left out: what they lacked may be here now.
    """
    found = files.read()
    if found is None or found["sources"] != sources or found["dry"]:
        return None
    cases = [case for case in found["cases"] if case["state"] != NOT_RUN]
    return found | {"cases": cases, "complete": found["complete"] and len(cases) == len(found["cases"])}


def _facts() -> dict[str, Any]:
    return {"machine": machine(), "commit": _commit(), "sources": sources_key()}


def _commit() -> str:
    """Of the checkout; a copy of its files, or a machine without git, does not tell."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def sources_key() -> str:
    """Changes with every source file of this repository's packages."""
    key = hashlib.sha256()
    tops = [ROOT / folder for folder in FOLDERS if folder != "."] + [ROOT / "tide_export", ROOT / "benchmarks" / "gpu"]
    for path in sorted(path for top in tops for path in top.rglob("*") if path.suffix in {".py", ".cuh", ".h"}):
        key.update(path.name.encode() + path.read_bytes())
    return key.hexdigest()[:12]


def _table(files: Sequence[StageFiles], ran: dict[int, dict[str, Any]]) -> Table:
    table = Table("stage", "", "result", "cases", "failed", "not run", "seconds", "expected", title="The kit")
    for file in files:
        content, stage = ran.get(file.stage.number) or file.read(), file.stage
        if content is None:
            table.add_row(str(stage.number), stage.title, "[yellow]left for the next call")
            continue
        counts = {state: sum(case["state"] == state for case in content["cases"]) for state in (FAILED, NOT_RUN)}
        state = content["state"] + ("" if stage.number in ran else " (earlier)")
        table.add_row(
            str(stage.number),
            stage.title,
            f"[{_COLORS.get(content['state'], 'red')}]{state}",
            f"{len(content['cases'])}/{content['cases_planned']}",
            *(str(count or "") for count in counts.values()),
            f"{content['seconds']:.0f}",
            f"{content['expected_seconds']:.0f}",
        )
    return table


def _print_estimates(results: Sequence[dict[str, Any]]) -> None:
    """Time on an H100, as the cases expect it, and the size of what travels."""
    for result in results:
        print(f"RESULT kit_stage{result['stage']}_seconds_estimate={result['expected_seconds']:.4g}")
    print(f"RESULT kit_minutes_estimate={sum(result['expected_seconds'] for result in results) / 60:.4g}")
    print(f"RESULT kit_mib={len(archive()) / 2**20:.4g}")
