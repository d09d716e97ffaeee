"""``tide-doctor``: what of ONNX Runtime, TensorRT, CUDA, torch, drivers and GPUs is here, and what each target lacks."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tide_runtime.cli.errors import run_app
from tide_runtime.cli.form import APP, COMMAND
from tide_runtime.cli.tables import titled_table
from tide_runtime.targets.checkup import every_target, lacking, machine_facts, present_gpus, warnings_of
from tide_runtime.targets.gpu_probe import driver_cuda

app = typer.Typer(**APP)
_NOTHING_RUNS = 1


@app.command(**COMMAND | {"no_args_is_help": False})
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the facts as one JSON object.")] = False) -> None:
    """Show which packages, drivers and GPUs are here, and what each target of `tide-export --list-targets` lacks here.

    The exit code is 0 when bundles of at least one target run on this machine, else 1.
    """
    facts = checkup()
    if as_json:
        print(json.dumps(facts, ensure_ascii=False, indent=1))
    else:
        _print(facts, Console(markup=False, highlight=False, emoji=False))
    if not any(target["runs"] for target in facts["targets"].values()):
        raise typer.Exit(_NOTHING_RUNS)


def checkup() -> dict[str, Any]:
    """What is here, and target → whether it runs and what it lacks, as JSON values."""
    facts = machine_facts()
    gpus = present_gpus()
    driver = driver_cuda()
    targets = {}
    for name, target in every_target().items():
        lacks = lacking(target, gpus, driver)
        targets[name] = {"runs": not lacks, "lacks": lacks}
    return facts | {"warnings": warnings_of(facts), "targets": targets}


def _print(facts: dict[str, Any], console: Console) -> None:
    here = _table("Here", "what", "found", header=False)
    for name, found in facts["packages"].items():
        here.add_row(name, found or "not installed")
    here.add_row("module onnxruntime", f"of {facts['imported_onnxruntime']}")
    here.add_row("driver", f"for CUDA {facts['driver_cuda']}" if facts["driver_cuda"] else "none")
    for number, gpu in enumerate(facts["gpus"]):
        here.add_row(f"GPU {number}", f"{gpu['name']}, sm_{gpu['compute']}")
    if not facts["gpus"]:
        here.add_row("GPU", "none with a driver")
    console.print(here)
    targets = _table("Targets", "target", "here")
    for name, target in facts["targets"].items():
        targets.add_row(name, "\n".join(target["lacks"]) or "runs")
    console.print(targets)
    for warning in facts["warnings"]:
        console.print(f"warning: {warning}")


def _table(title: str, first: str, second: str, header: bool = True) -> Table:
    table = titled_table(title, header=header)
    table.add_column(first, no_wrap=True)
    table.add_column(second, overflow="fold")
    return table


def main() -> None:
    """Entry point of ``tide-doctor``."""
    run_app(app)


if __name__ == "__main__":
    main()
