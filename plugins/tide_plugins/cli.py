"""``python -m tide_plugins build``: compile every kernel for every architecture, without a GPU, and report resources."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from tide_runtime.bundle.architectures import ARCHITECTURES, Architecture, architectures
from tide_runtime.cli.errors import run_app
from tide_runtime.cli.form import APP, COMMAND
from tide_runtime.errors import ParamsError, TargetError

from tide_plugins.build.builder import Builder, BuiltKernel
from tide_plugins.build.compiler import why_not_built
from tide_plugins.build.table import CLOSING, OPENING, facts, grids, in_order, spilling, write_section
from tide_plugins.kernels import KERNELS

app = typer.Typer(**APP, no_args_is_help=True, context_settings=COMMAND["context_settings"])
_SPILLED = 1  # exit code


@app.callback()
def _about() -> None:
    """TIDE's CUDA kernels: an exit's router, and the decode loop."""


@app.command(**COMMAND | {"no_args_is_help": False})
def build(
    arch: Annotated[
        str, typer.Option(help="`all`, or a comma-separated list: " + ", ".join(f"`{a.name}`" for a in ARCHITECTURES) + ".")
    ] = "all",
    cache: Annotated[
        Path | None,
        typer.Option(help="The compilation cache; `$TIDE_CACHE_DIR/cubins`, else `~/.cache/tide/cubins`."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Compilations at a time.")] = len(os.sched_getaffinity(0)),
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as one JSON object instead of tables.")] = False,
    markdown: Annotated[
        Path | None, typer.Option(help=f"Also write the tables into this Markdown file, between `{OPENING}` and `{CLOSING}`.")
    ] = None,
) -> None:
    """Compile the kernels with NVRTC and print registers, shared memory, spills and size of each.

    Needs no GPU, no driver and no CUDA toolkit: `pip install 'tide-llm[kernels]'` brings the compilers of CUDA 13
    (`sm_75` and newer) and CUDA 12 (`sm_70`: V100). What was compiled before is taken from the cache; its key is the bytes
    of all sources, the options, the compiler's version and the architecture.

    Exit code 0: all built, no spills. 1: a kernel keeps registers in memory (it works, slowly). 2: it could not be built.

    * `python -m tide_plugins build` – everything that the compilers at hand know

    * `python -m tide_plugins build --arch sm_89,sm_90 --json` – two architectures, for a script
    """
    if jobs < 1:
        raise ParamsError(f"--jobs is {jobs}; expected at least 1")
    targets, missing = _targets(arch)
    begin = time.perf_counter()
    built = _build(Builder(cache), targets, jobs)
    seconds = time.perf_counter() - begin
    spills = spilling(built)
    if as_json:
        print(json.dumps({"images": facts(built), "not_built": missing, "spills": spills, "seconds": seconds}, indent=1))
    else:
        _print(built, missing, spills, seconds)
    if markdown is not None:
        write_section(markdown, built)
    if spills:
        raise typer.Exit(_SPILLED)


def _targets(names: str) -> tuple[list[Architecture], dict[str, str]]:
    """Architectures to build, and name → reason for those of ``all`` that the installed compilers do not support.

    Raises TargetError for an explicitly named architecture that is not supported.
    """
    wanted = architectures(names)
    reasons = {target.name: reason for target in wanted if (reason := why_not_built(target)) is not None}
    possible = [target for target in wanted if target.name not in reasons]
    if reasons and (names != "all" or not possible):
        raise TargetError("\n".join(reasons.values()))
    return possible, reasons


def _build(builder: Builder, targets: Sequence[Architecture], jobs: int) -> list[BuiltKernel]:
    built = []
    columns = (SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=_stderr(), transient=True) as progress:
        task = progress.add_task("compile", total=len(KERNELS) * len(targets))
        for item in builder.build_all(KERNELS, targets, jobs):
            progress.update(task, advance=1, description=f"{item.kernel.name} {item.architecture.name}")
            built.append(item)
    return in_order(built)


def _print(built: Sequence[BuiltKernel], missing: dict[str, str], spills: list[str], seconds: float) -> None:
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    for grid in grids(built):
        console.print(grid.text())
    cached = sum(item.cached for item in built)
    entries = sum(len(item.image.resources) for item in built)
    console.print(
        f"{len(built)} images, {entries} entry points compiled to machine code, {len(spills)} with spills; "
        f"{len(built) - cached} compiled, {cached} from the cache, {seconds:.1f} s"
    )
    for name, reason in missing.items():
        console.print(f"not built: {name}: {reason}")
    for line in spills:
        console.print(f"spills: {line}", style="red")


def _stderr() -> Console:
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def main() -> None:
    """Entry point of ``python -m tide_plugins``."""
    run_app(app)
