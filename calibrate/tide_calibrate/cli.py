"""Command line: ``tide-calibrate MODEL`` calibrates early exits, ``tide-calibrate report DIR`` draws the report again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tide_runtime.cli.errors import run_app
from tide_runtime.cli.form import APP, COMMAND, with_options
from tide_runtime.targets.target_choice import AUTO
from typer.core import TyperGroup

from tide_calibrate.config import CalibrationConfig
from tide_export.progress import ExportProgress, peak_memory_bytes


class _CalibrateByDefault(TyperGroup):
    """Run the command ``calibrate`` when the first argument names no command."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["calibrate", *args])


app = typer.Typer(cls=_CalibrateByDefault, **APP)
_choice = partial(typer.Option, rich_help_panel="Certificate and predicted speed")
_model = partial(typer.Option, rich_help_panel="Model")
_output = partial(typer.Option, rich_help_panel="Output")


@app.command(**COMMAND)
@with_options(costs="window")
def calibrate(
    model: Annotated[
        str, typer.Argument(help="A model directory (config.json and *.safetensors), a .gguf file, or a hub id such as org/name.")
    ],
    data: Annotated[
        str,
        typer.Option(
            help="Text like the text to be generated: a text or .jsonl file, a directory, or a data set id "
            "name[:config][:split].",
            rich_help_panel="Text",
        ),
    ],
    out: Annotated[Path, _output(help="The calibration's directory; it must not exist yet, unless --force.")],
    config: CalibrationConfig,
    *,
    costs: Annotated[
        str,
        _choice(help="Step costs: measure (on this machine), none, or a costs.json that an earlier calibration wrote."),
    ] = "measure",
    target: Annotated[
        str,
        _choice(help="Step costs and policies are timed on it; auto: cpu, with --device cuda one of that GPU."),
    ] = AUTO,
    revision: Annotated[str | None, _model(help="Branch, tag or commit of a hub model.")] = None,
    trust_remote_code: Annotated[
        bool,
        _model(
            "--trust-remote-code", help="Run the Python code of the model's repository, and of the reference's. Read it first."
        ),
    ] = False,
    keep_capture: Annotated[
        bool, _output("--keep-capture", help="Keep OUT.work, the captured states, for another run with other heads.")
    ] = False,
    force: Annotated[
        bool, _output("--force", help="Replace an existing calibration; the old one stays until the new one is whole.")
    ] = False,
) -> None:
    """Train early exits for a frozen model, certify their disagreement with it, and predict the speedup.

    Example: `tide-calibrate ./my-model --data texts/ --out calib/`, then
    `tide-export ./my-model --calibration calib/ --out engine/`.

    The model's weights do not change. An interrupted run resumes when the same command is run again. Open
    `calib/report/index.html` for the charts; `tide-calibrate report calib/` draws them again.
    """
    progress = ExportProgress(Console(stderr=True, soft_wrap=True))
    with progress.interruptible():
        from tide_calibrate.calibrate import calibrate as run  # torch takes seconds to import; --help should not
        from tide_calibrate.report.terminal import print_summary

        file = run(
            model,
            data,
            out,
            config,
            costs=costs,
            target=target,
            revision=revision,
            trust_remote_code=trust_remote_code,
            keep_capture=keep_capture,
            force=force,
            progress=progress,
        )
        print_summary(file, Console(markup=False, highlight=False))
    progress.console.print(
        f"[bold]{out}[/bold]: {sum(progress.seconds.values()):.0f} s, peak memory {peak_memory_bytes() / 2**30:.1f} GiB; "
        f"open {out / 'report' / 'index.html'}"
    )


@app.command(**COMMAND)
def report(
    calibration: Annotated[Path, typer.Argument(help="The calibration's directory, as --out named it.")],
) -> None:
    """Draw a calibration's report again from its saved data, and print its summary."""
    from tide_calibrate.report.draw import redraw
    from tide_calibrate.report.terminal import print_summary
    from tide_export.calibration.calibration_file import read_calibration

    page = redraw(calibration)
    print_summary(read_calibration(calibration), Console(markup=False, highlight=False))
    Console(stderr=True, markup=False, highlight=False).print(f"drawn: {page}")


def main() -> None:
    """Entry point: errors meant for the user become one message and their exit code."""
    interrupted = "interrupted; the captured states are kept, run the same command to go on"
    run_app(app, interrupted, command="tide-calibrate", extra="calibrate")


if __name__ == "__main__":
    main()
