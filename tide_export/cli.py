"""``tide-export``: any HuggingFace causal LM to a bundle of compiled segments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tide_runtime.cli.errors import run_app
from tide_runtime.cli.exporter_process import step_behind
from tide_runtime.cli.form import APP, COMMAND, with_options

from tide_export.config import ExportConfig
from tide_export.progress import ExportProgress, peak_memory_bytes

# Before torch is imported: its threads spin while they wait for each other, and beside another busy process a phase then takes
# three times as long as with threads that sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
app = typer.Typer(**APP)


def _list_targets(wanted: bool) -> None:
    if wanted:
        from tide_export.targets.choice import targets_table

        Console(markup=False, emoji=False).print(targets_table())
        raise typer.Exit


@app.command(**COMMAND)
@with_options(list_targets="max_batch")
def export(
    model: Annotated[
        str, typer.Argument(help="A model directory (config.json and *.safetensors), a .gguf file, or a hub id such as org/name.")
    ],
    out: Annotated[Path, typer.Option(help="The bundle's directory; it must not exist yet, unless --force.")],
    config: ExportConfig,
    *,
    list_targets: Annotated[
        bool,
        typer.Option("--list-targets", callback=_list_targets, is_eager=True, help="Print the table of targets and exit."),
    ] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Print a line for each phase, without figures of checks.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model repository's own Python code. Read it first.")
    ] = False,
    in_place: Annotated[int | None, typer.Option(hidden=True, help="See `exporter_process.run_exporter`.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing bundle; the old one stays until the new one is whole.")
    ] = False,
) -> None:
    """Cut a causal LM into segments and compile them into a bundle.

    Example: `tide-export ./my-model --out engine/`, then `tide-run engine/ "def main():"`.

    For GPUs: `tide-export ./my-model --dtype fp16 --out engine/ --target cpu --target rtx-sm_89`.

    With early exits: `tide-export ./my-model --data ./texts --out engine/`.

    With a trained drafter: `tide-export ./my-model --draft-head eagle3:./head --out engine/`.

    The model runs unmodified while it is traced; by default the finished bundle is compared with it and refused on a
    mismatch. An interrupted or failed export leaves nothing behind but the calibration that it made.
    """
    console = Console(stderr=True, soft_wrap=True)
    progress = ExportProgress(console, brief=brief)
    with progress.interruptible():
        from tide_export.export import export as run  # torch takes seconds to import; --help should not

        def step_aside() -> None:
            console.quiet = True
            step_behind(in_place)

        options = {"revision": revision, "trust_remote_code": trust_remote_code, "force": force, "progress": progress}
        manifest = run(model, out, config, **options, in_place=step_aside if in_place is not None else None)
    size = sum(info.bytes for info in manifest.files.values())
    console.print(
        f"[bold]{out}[/bold]: {manifest.model.architecture}, {manifest.model.parameters / 1e6:.1f}M parameters, "
        f"{len(manifest.segments)} segments, {manifest.dtype}, {size / 2**20:.0f} MiB; "
        f"{sum(progress.seconds.values()):.0f} s, peak memory {peak_memory_bytes() / 2**30:.1f} GiB"
    )
    if manifest.calibration is not None:
        predicted = ", ".join(f"{policy} {ratio:.2f}x" for policy, ratio in manifest.calibration.predicted.items())
        console.print(
            f"exits after layers {[e.checkpoint for e in manifest.calibration.exits]}, recommended policy "
            f"[bold]{manifest.calibration.recommended}[/bold], predicted speedup {predicted or 'none'}",
            highlight=False,
        )


def main() -> None:
    """Entry point: errors meant for the user become one message and their exit code."""
    run_app(app, "interrupted; no bundle was written", command="tide-export", extra="export")


if __name__ == "__main__":
    main()
