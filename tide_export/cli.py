"""``tide-export``: any HuggingFace causal LM to a bundle of compiled segments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tide_runtime.cli.errors import run_app
from tide_runtime.cli.exporter_process import step_behind
from tide_runtime.cli.form import APP, COMMAND

from tide_export.config import AUTO, ExportConfig
from tide_export.progress import ExportProgress, peak_memory_bytes

# Before torch is imported: its threads spin while they wait for each other, and beside another busy process a phase then takes
# three times as long as with threads that sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
app = typer.Typer(**APP)
_DEFAULTS = ExportConfig()


def _list_targets(wanted: bool) -> None:
    if wanted:
        from tide_export.targets.choice import targets_table

        Console(markup=False, emoji=False).print(targets_table())
        raise typer.Exit


@app.command(**COMMAND)
def export(
    model: Annotated[
        str, typer.Argument(help="A model directory (config.json and *.safetensors), a .gguf file, or a hub id such as org/name.")
    ],
    out: Annotated[Path, typer.Option(help="The bundle's directory; it must not exist yet, unless --force.")],
    dtype: Annotated[str, typer.Option(help="Precision of weights and caches: fp32, fp16 or bf16.")] = _DEFAULTS.dtype,
    weights: Annotated[
        str,
        typer.Option(
            help="Precision of the matrices: auto (w8a8 where it fits this machine's memory, else 4 bits; source for GPUs), w8a8 "
            "(products of integers on processors, 8 bits a weight), source (as stored; blocks of GGUF, GPTQ, AWQ, "
            "compressed-tensors are kept), int8 or int4 (quantised here; embedding in 8 bits, head: --head-bits), fp32, fp16 or "
            "bf16 (dequantised). auto takes what a --calibration was made for."
        ),
    ] = AUTO,
    quantizer: Annotated[
        str,
        typer.Option(
            help="With --weights int4 (int8 is always rounded to nearest): rtn, "
            "gptq (minutes, reads text: --text), gptq_mixed (gptq, but the eighth of the weights whose "
            "rounding changes the output most has 8 bits: the most accurate, a tenth larger)."
        ),
    ] = _DEFAULTS.quantizer,
    head_bits: Annotated[
        str,
        typer.Option(
            help="Of the head with --weights int4: 4, 8, or auto, which takes 4 where the head is a tenth of the model or more "
            "and the perplexity of a fixed text rises by at most 1%; the manifest has the figures."
        ),
    ] = _DEFAULTS.head_bits,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Text like what the model will write: a file, a directory or a hub data set. --weights w8a8 reads 256 tokens "
            "of it, by default of Python's documentation; --quantizer gptq and gptq_mixed need some 16,000. With --data they "
            "read that. With --calibration give the text that tide-calibrate read.",
        ),
    ] = None,
    kv: Annotated[
        str,
        typer.Option(
            help="Precision of the KV cache: model (that of --dtype) or int8 (targets cpu and torch: a quarter of the memory of "
            "fp32; prompts take longer)."
        ),
    ] = _DEFAULTS.kv,
    checkpoints: Annotated[
        str,
        typer.Option(
            help="Where to cut, in layers run before the cut: 6,12,18 or every:6 or none or auto (where the calibration has "
            "its exits; four even segments without one)."
        ),
    ] = _DEFAULTS.checkpoints,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            help="KV cache slots per sequence: prompt and output together, in tokens. Default: the model's own, at most 4096."
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Exits for this model, as `tide-calibrate MODEL --data DATA --out DIR` made them: where tokens may stop, how "
            "sure a router must be, and what that gains. Without them every token takes every layer.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Calibrate exits first, on text like what the model will write: a file, a directory or a hub data set. Minutes; "
            "run `tide-calibrate` yourself to keep its files, choose its options, or export one calibration twice.",
        ),
    ] = None,
    draft_head: Annotated[
        str | None,
        typer.Option(
            metavar="eagle3:DIR|mtp",
            help="A trained drafter for policy exact: eagle3:DIR, an EAGLE-3 head for this model (config.json and *.safetensors "
            "as SpecForge, EAGLE or speculators write them), or mtp, the multi-token-prediction layer in the checkpoint itself. "
            "No calibration is needed; how it is read best is tried on replies of the model, which is in memory for that.",
        ),
    ] = None,
    target: Annotated[
        list[str],
        typer.Option(
            help="What to compile for; repeatable, all in one bundle. auto: the CPU and what fits the GPU present, if any; all: "
            "what this machine can compile for. --list-targets shows the table. A target that fails does not spoil the others: "
            "the bundle is written without it, and the exit code is 3."
        ),
    ] = list(_DEFAULTS.targets),  # noqa: B006
    list_targets: Annotated[
        bool,
        typer.Option("--list-targets", callback=_list_targets, is_eager=True, help="Print the table of targets and exit."),
    ] = False,
    max_batch: Annotated[
        int, typer.Option(help="Most sequences in one step of TensorRT and TensorRT-RTX engines; other targets take any number.")
    ] = _DEFAULTS.max_batch,
    force_rebuild: Annotated[
        bool,
        typer.Option(
            "--force-rebuild",
            help="Build engines anew. By default those whose graph, precision, steps and tool are unchanged come from "
            "$TIDE_CACHE_DIR/engines or ~/.cache/tide/engines.",
        ),
    ] = False,
    hardware_compatible: Annotated[
        bool,
        typer.Option("--hardware-compatible", help="TensorRT, sm_80 and newer: engines for all GPUs from Ampere on; slower."),
    ] = False,
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="TensorRT: engines that later releases of the same major version load.")
    ] = False,
    strip_weights: Annotated[
        bool,
        typer.Option("--strip-weights", help="TensorRT: engines without weights, which lie beside them and are put in at load."),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Take the tokenizer and its chat template from here: a directory with tokenizer.json, such a file, a .gguf file "
            "or a hub id. none: a bundle without tokenizer, whose prompts are token ids. Default: the model's own.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Compare the bundle with the eager model on real prompts before finishing.")
    ] = _DEFAULTS.verify,
    explain: Annotated[bool, typer.Option("--explain", help="Print where a lowering pass did not apply, and why.")] = False,
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
    config = ExportConfig(
        dtype,
        checkpoints,
        max_seq_len,
        tuple(target),
        verify,
        explain,
        calibration=calibration,
        data=data,
        max_batch=max_batch,
        force_rebuild=force_rebuild,
        hardware_compatible=hardware_compatible,
        version_compatible=version_compatible,
        strip_weights=strip_weights,
        weights=weights,
        quantizer=quantizer,
        head_bits=head_bits,
        text=text,
        kv=kv,
        tokenizer=tokenizer,
        draft_head=draft_head,
    )
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
