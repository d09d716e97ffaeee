"""The command line of the kit: one call of the short plan, or chosen stages, and a summary of what they found."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.kit.bare_image import FOLDERS, ROOT
from benchmarks.gpu.kit.child import FAILED, NOT_RUN, PASSED, PREPARED
from benchmarks.gpu.kit.plan import CALLS, SECONDS, chosen, expected_seconds
from benchmarks.gpu.kit.runner import Call, Result, ResultFiles

WORK, CARRIED = ROOT / "build" / "gpu-kit", ROOT / "build" / "kit-bundles"
_LEFT_BEHIND = ("examples/demo_model/stock", "examples/demo_model/looped")  # of what would travel; no stage reads them
_DRY_SECONDS, _DRY_ARCH = 3600.0, "sm_90"
_MOST_FAILURES, _MOST_CHARACTERS = 20, 300  # of a summary, and of one of its lines


def main() -> None:
    """Exit code 0: no case failed; 1: some did; 2: nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", choices=["short"], default="short", help="for a GPU that is lent for 15 minutes")
    parser.add_argument("--call", type=int, choices=sorted(CALLS), default=1, help="which of the plan's calls")
    parser.add_argument("--stages", help="comma-separated beginnings of stages' names, instead of the call's")
    parser.add_argument("--seconds", type=float, help="the call's time; what does not fit is left")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", WORK / "out")), help="folder of results")
    parser.add_argument("--dry-run", action="store_true", help="do everything up to the launches; needs no GPU")
    given = parser.parse_args()
    try:
        rows = chosen(given.stages) if given.stages else CALLS[given.call]
    except ValueError as error:
        parser.error(str(error))
    if not given.dry_run and (refusal := no_gpu()) is not None:
        print(f"NOT RUN: {refusal}; --dry-run does everything up to the launches")
        sys.exit(2)
    own_network(given.dry_run)
    work = Path(tempfile.mkdtemp(prefix="gpu-kit-")) if given.dry_run else WORK / "work"
    facts = {"call": given.call, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "dry": given.dry_run}
    files = ResultFiles(work / "out" if given.dry_run else given.out, facts | {"sources": sources_key()})
    seconds = _DRY_SECONDS if given.dry_run else given.seconds or SECONDS[given.call]
    call = Call(files, seconds, {"arch": _DRY_ARCH, "work": str(work), "carried": str(CARRIED), "dry": given.dry_run})
    try:
        call.run(rows)
    finally:
        print(summary(files.results))
        files.archive(work)
        if given.dry_run:
            shutil.copytree(files.folder, given.out, dirs_exist_ok=True)
            shutil.rmtree(work)
    if given.dry_run:
        for number, some in CALLS.items():
            print(f"RESULT kit_call{number}_s={expected_seconds(some):.4g}")
        print(f"RESULT kit_mib={travelling_bytes() / 2**20:.4g}")
        print(f"RESULT kit_lines={sum(len(path.read_text().splitlines()) for path in Path(__file__).parent.rglob('*.py'))}")
    print(f"RESULT kit_seconds={time.monotonic() - call.begun:.4g}")
    sys.exit(any(result["state"] == FAILED for result in files.results))


def no_gpu() -> str | None:
    """Why this machine's driver has no GPU, or None."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return None if Path("/dev/nvidia0").exists() else f"there is no CUDA driver ({error})"
    status = driver.cuInit(0)
    return f"cuInit returned {status}" if status else None


def own_network(dry: bool) -> None:
    """Start a dry run again without a network, as a lent machine has none, where this machine allows network namespaces."""
    unshare = ["unshare", "--user", "--map-root-user", "--net"]
    if not dry or "KIT_NETWORK" in os.environ or shutil.which("unshare") is None:
        return
    os.environ["KIT_NETWORK"] = "none"
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode == 0:
        os.execvp("unshare", [*unshare, sys.executable, "-m", "benchmarks.gpu.kit", *sys.argv[1:]])


def sources_key() -> str:
    """Changes with every source file of this repository's packages: later results of other code are told apart by it."""
    key = hashlib.sha256()
    tops = [ROOT / folder for folder in FOLDERS if folder != "."] + [ROOT / "tide_export", ROOT / "benchmarks" / "gpu"]
    for path in sorted(path for top in tops for path in top.rglob("*") if path.suffix in {".py", ".cuh", ".h"}):
        key.update(path.name.encode() + path.read_bytes())
    return key.hexdigest()[:12]


def travelling_bytes() -> int:
    """Bytes of the files that git knows or does not ignore, without `_LEFT_BEHIND`, and of the carried folder."""
    listed = subprocess.check_output(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True)
    tree = [ROOT / name for name in listed.splitlines() if not name.startswith(_LEFT_BEHIND)]
    return sum(path.stat().st_size for path in [*tree, *CARRIED.rglob("*")] if path.is_file())


def summary(results: Sequence[Result]) -> str:
    """Figures, then what failed, then a line for each stage: a caller may see only the end of the output."""
    passed = [r for r in results if r["state"] == PASSED and r.get("figures") and r["stage"] not in ("machine", "graphs")]
    lines = [f"{r['stage']}, {r['case']}: {shown(r['figures'])[:_MOST_CHARACTERS]}" for r in passed]
    failed = [result for result in results if result["state"] == FAILED]
    lines += [f"FAILED {r['stage']}, {r['case']}: {r['reason'][:_MOST_CHARACTERS]}" for r in failed[:_MOST_FAILURES]]
    stages = dict.fromkeys(result["stage"] for result in results)
    lines += [_stage_line(name, [result for result in results if result["stage"] == name]) for name in stages]
    return "\n".join(lines)


def _stage_line(name: str, results: Sequence[Result]) -> str:
    counts = {state: sum(result["state"] == state for result in results) for state in (PASSED, PREPARED, FAILED, NOT_RUN, "left")}
    words = [f"{count} {state}" for state, count in counts.items() if count]
    seconds = sum(result["seconds"] for result in results if result["case"] == "stage")
    return f"{name:<18} {', '.join(words) or 'no case':<40} {seconds:6.1f} s"


def shown(figures: Mapping[str, Any]) -> str:
    """Numbers first, without lists."""
    parts = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            parts.append(f"{name} {{{shown(value)}}}")
        elif not isinstance(value, list):
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(parts)
