"""How large the code is: lines outside tests by package, and files that are too small to be an idea of their own.

    python -m benchmarks.size --before HEAD~20

Counted are all lines of tracked and new Python, CUDA and C++ files, blank ones and comments included, but for the folder tests/
(and plugins/trt/test, which older revisions have). Small files are Python files of fewer than 60 lines; empty ones, which only
mark a package, do not count.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from tide_bench.report import Report

ROOT = Path(__file__).resolve().parents[1]
FILES = ("*.py", "*.cu", "*.cuh", "*.cpp", "*.h", ":!tests", ":!plugins/trt/test")
FEWEST_LINES = 60
_OF_RUNTIME = 2  # parts of a path that name a package in the folder runtime; elsewhere it is the first one


def file_lines(revision: str | None) -> dict[str, int]:
    """Path → lines of every file that is not empty. ``revision``: of git; None: as the files are now."""
    where = ["--untracked"] if revision is None else [revision]
    command = ["git", "grep", "--count", "-I", "-e", "", *where, "--", *FILES]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    prefix = "" if revision is None else f"{revision}:"
    counts = (line.removeprefix(prefix).rsplit(":", 1) for line in printed.splitlines())
    return {path: int(lines) for path, lines in counts}


def by_package(lines: dict[str, int]) -> Counter[str]:
    """Package → lines of its files."""
    found: Counter[str] = Counter()
    for path, count in lines.items():
        parts = path.split("/")
        found["/".join(parts[: _OF_RUNTIME if parts[0] == "runtime" else 1])] += count
    return found


def small_files(lines: dict[str, int]) -> int:
    return sum(count < FEWEST_LINES for path, count in lines.items() if path.endswith(".py"))


def check_revision(revision: str) -> str:
    """Raises typer.BadParameter for a revision that the repository lacks, as a shallow clone lacks old ones."""
    if subprocess.run(["git", "cat-file", "-e", f"{revision}^{{commit}}"], cwd=ROOT, capture_output=True).returncode:
        raise typer.BadParameter(f"this clone has no revision {revision!r}; fetch it, or give another one")
    return revision


def main(
    before: Annotated[str | None, typer.Option(help="A git revision to compare with.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Count lines and small files, before and now."""
    report = Report("size", before=before)
    now, then = file_lines(None), file_lines(check_revision(before)) if before is not None else {}
    packages, old = by_package(now), by_package(then)
    rows = [[name, f"{old[name]:,}", f"{packages[name]:,}"] for name in sorted(packages | old)]
    rows.append(["all", f"{old.total():,}", f"{packages.total():,}"])
    rows.append([f"Python files under {FEWEST_LINES} lines", str(small_files(then)), str(small_files(now))])
    report.table("Size", ["lines outside tests", before or "before", "now"], rows)
    report.add("lines_outside_tests", packages.total())
    report.add("files_under_60_lines", small_files(now))
    if then:
        report.add("lines_outside_tests_before", old.total())
        report.add("files_under_60_lines_before", small_files(then))
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
