"""Command line: ``tide-calibrate MODEL`` calibrates early exits, ``tide-calibrate report DIR`` draws the report again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tide_runtime.cli.errors import run_app
from tide_runtime.cli.form import APP, COMMAND
from tide_runtime.targets.select import AUTO
from typer.core import TyperGroup

from tide_calibrate.config import CalibrationConfig
from tide_export.config import QUANTIZERS, WEIGHTS
from tide_export.progress import ExportProgress, peak_memory_bytes


class _CalibrateByDefault(TyperGroup):
    """Run the command ``calibrate`` when the first argument names no command."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["calibrate", *args])


app = typer.Typer(cls=_CalibrateByDefault, **APP)
_DEFAULTS = CalibrationConfig()
_text = partial(typer.Option, rich_help_panel="Text")
_training = partial(typer.Option, rich_help_panel="Training")
_choice = partial(typer.Option, rich_help_panel="Certificate and predicted speed")
_model = partial(typer.Option, rich_help_panel="Model")
_output = partial(typer.Option, rich_help_panel="Output")


@app.command(**COMMAND)
def calibrate(
    model: Annotated[
        str, typer.Argument(help="A model directory (config.json and *.safetensors), a .gguf file, or a hub id such as org/name.")
    ],
    data: Annotated[
        str,
        _text(
            help="Text like the text to be generated: a text or .jsonl file, a directory, or a data set id name[:config][:split]."
        ),
    ],
    out: Annotated[Path, _output(help="The calibration's directory; it must not exist yet, unless --force.")],
    heads: Annotated[
        str,
        _training(help="Exit heads to train: auto (identity, linear, tail:1, tail:2), or a list: linear,tail:2."),
    ] = _DEFAULTS.heads,
    candidates: Annotated[
        str,
        _training(help="Where tokens may stop, in layers run: 4,8,12 or every:2 or auto (the first two thirds; ends of loops)."),
    ] = _DEFAULTS.candidates,
    router: Annotated[
        str,
        _training(
            help="Score that decides whether a token stops: mlp, max_probability, mlp+max_probability, gate (of a looped model "
            "that has one), or auto."
        ),
    ] = _DEFAULTS.router,
    max_disagreement: Annotated[
        float, _choice(help="Share of tokens at which policy exit may differ from the full model, or from --reference.")
    ] = _DEFAULTS.max_disagreement,
    confidence: Annotated[float, _choice(help="Confidence of the certificate of that share.")] = _DEFAULTS.confidence,
    costs: Annotated[
        str,
        _choice(help="Step costs: measure (on this machine), none, or a costs.json that an earlier calibration wrote."),
    ] = "measure",
    window: Annotated[int, _text(help="Tokens per window of text.")] = _DEFAULTS.window,
    max_windows: Annotated[int, _text(help="Windows of text used at most.")] = _DEFAULTS.max_windows,
    rank: Annotated[int, _training(help="Rank of the translators, at most 128.")] = _DEFAULTS.rank,
    prompts: Annotated[
        int, _choice(help="Held-out prompts that the model continues; speed is predicted on these continuations.")
    ] = _DEFAULTS.prompts,
    new_tokens: Annotated[int, _choice(help="Tokens of each continuation.")] = _DEFAULTS.new_tokens,
    minutes: Annotated[
        float,
        _training(
            help="Minutes to aim at for a small model and 100,000 tokens. Training exits takes a fifth, the draft head a sixth: "
            "fewer mean fewer steps, and fewer kinds of exit heads at every candidate; more allow more steps and more replies."
        ),
    ] = _DEFAULTS.minutes,
    draft_head: Annotated[
        bool | None,
        _training(
            help="Train a draft head, which guesses tokens for policy exact from the model's own states. Given neither way, one "
            "is trained, and left out again where exact is measured to be no faster with it."
        ),
    ] = _DEFAULTS.draft_head,
    seed: Annotated[int, _training(help="Random seed; the same seed, data and costs give the same bytes.")] = (_DEFAULTS.seed),
    dtype: Annotated[str, _model(help="Precision the model runs in; export it in the same.")] = _DEFAULTS.dtype,
    weights: Annotated[
        str, _model(help=f"Weights to calibrate for: {', '.join(WEIGHTS)}, as tide-export takes it; export with the same.")
    ] = _DEFAULTS.weights,
    quantizer: Annotated[
        str,
        _model(
            help=f"With --weights int8 or int4: {', '.join(QUANTIZERS)}; export with the same. gptq and gptq_mixed read --data; "
            "export with --text DATA."
        ),
    ] = _DEFAULTS.quantizer,
    reference: Annotated[
        str,
        _choice(
            help="The model that the certificate compares with: fp32 (the weights before --weights rounds them), or the "
            "directory, file or hub id of the original of a GGUF or GPTQ model. Default: the calibrated model's own last layer.",
            show_default=False,
        ),
    ] = _DEFAULTS.reference,
    device: Annotated[str, _model(help="What PyTorch runs on: cpu, cuda, cuda:1.")] = _DEFAULTS.device,
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
    config = CalibrationConfig(
        heads=heads,
        candidates=candidates,
        router=router,
        max_disagreement=max_disagreement,
        confidence=confidence,
        window=window,
        max_windows=max_windows,
        rank=rank,
        prompts=prompts,
        new_tokens=new_tokens,
        minutes=minutes,
        draft_head=draft_head,
        seed=seed,
        dtype=dtype,
        weights=weights,
        quantizer=quantizer,
        reference=reference,
        device=device,
    )
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
