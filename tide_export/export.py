"""The export, phase by phase: load → trace → lower and cut → write → verify → rename into place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from tide_runtime.bundle.manifest import (
    Manifest,
)
from tide_runtime.errors import CalibrationError, IncompleteBundleError

from tide_export.bundle_writer import new_directory
from tide_export.calibration.exit_calibration import ExitCalibration, read_exit_calibration
from tide_export.chosen_weights import chosen_weights
from tide_export.config import AUTO, ExportConfig, reads_text
from tide_export.drafters.base import MeasuredDrafter
from tide_export.drafters.importing import check_draft_head, import_drafter
from tide_export.export_run import ExportRun, Written, write_manifest
from tide_export.graphs.exit_gate import OwnExits
from tide_export.load import held_in_memory, load_model, quantized
from tide_export.model.embedding_model import check_options_of_embedding
from tide_export.progress import ExportProgress
from tide_export.quantize.gptq import calibration_tokens
from tide_export.quantize.head_bits import with_head
from tide_export.quantize.integer_weights import in_integers
from tide_export.sources.loaded_model import LoadedModel
from tide_export.sources.source_tokenizer import check_embedded
from tide_export.targets.base import Target
from tide_export.targets.choice import buildable, check_options, choose_targets
from tide_export.trace.trace_model import TracedModel
from tide_export.verify.check_results import Check
from tide_export.verify.checks import check_loaded
from tide_export.weights.quantized_weight import INTEGER


def export(
    source: str,
    out: str | Path,
    config: ExportConfig | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    progress: ExportProgress | None = None,
    in_place: Callable[[], None] | None = None,
) -> Manifest:
    """Export the model in directory or hub id ``source`` to a bundle in ``out``; returns its manifest.

    Args:
        in_place: called when the bundle lies in ``out`` and runs, before it is verified; a bundle that fails is deleted. None: it
            gets there verified.

    Raises a child of TideError if the model cannot be loaded or compiled, differs from the bundle, or ``out`` exists (unless
    ``force``); ``out`` is then unchanged. Raises IncompleteBundleError if ``out`` was written but lacks requested targets that
    could not be built.
    """
    config, progress = config or ExportConfig(), progress or ExportProgress(quiet=True)
    targets, refused = choose_targets(config.targets, config.dtype, config.kv)
    check_options(config.trt, targets, refused)  # fails before minutes of work
    calibration = read_exit_calibration(Path(config.calibration)) if config.calibration is not None else None
    with ExitStack() as stack, new_directory(Path(out), force) as directory:
        choices = (config.dtype, revision, trust_remote_code, config.weights, config.tokenizer)
        with progress.phase(f"load {source}"):
            loaded = load_model(source, *choices, stream=True, note=progress.note)
        if config.verify:
            with progress.phase("check tokens and positions"):
                check_loaded(loaded, own_tokenizer=config.tokenizer is None)
        if config.weights == AUTO:
            config = _with_weights(config, loaded, targets, calibration, progress)
        if config.data is not None:
            options = {"weights": config.weights, "quantizer": config.quantizer, "tokenizer": config.tokenizer}
            first = _calibrator()(source, config.data, Path(out), revision, trust_remote_code, progress, **options)
            calibration = stack.enter_context(first)
        if loaded.embedding is not None:
            check_options_of_embedding(config)
        if config.draft_head is not None:
            check_draft_head(config.draft_head, loaded)
        loaded = quantize_loaded(loaded, config.weights, config.quantizer, progress, config.quantizer_text, config.head_bits)
        drafter = None
        if config.draft_head is not None:
            loaded = held_in_memory(loaded, "the draft head is measured on replies that it writes", progress.note)
            drafter = _imported(config.draft_head, loaded, progress)
        run = ExportRun(loaded, directory, config, progress, calibration, drafter)
        written = run.write()
        manifest = run.hashed(written.manifest if in_place is not None else written.verified(directory)[0])
    if in_place is not None:
        manifest = _verified_in_place(replace(written, manifest=manifest), Path(out), in_place)
    if progress.failures:
        raise IncompleteBundleError(_incomplete(out, manifest, progress.failures, config))
    return manifest


def _verified_in_place(written: Written, out: Path, in_place: Callable[[], None]) -> Manifest:
    in_place()
    try:
        manifest = written.verified(out)[0]
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    write_manifest(manifest, out)
    return manifest


def _with_weights(
    config: ExportConfig,
    loaded: LoadedModel,
    targets: Sequence[Target],
    calibration: ExitCalibration | None,
    progress: ExportProgress,
) -> ExportConfig:
    """``config`` with weights in the place of `AUTO`: those of the calibration, if there is one."""
    if calibration is not None:
        form, _, quantizer = calibration.file.weights.partition(" ")
        return replace(config, weights=form, quantizer=quantizer or config.quantizer)
    weights, reason = chosen_weights(loaded, config, targets)
    progress.console.print(f"  weights {weights}: {reason}", highlight=False)
    return replace(config, weights=weights)


def quantize_loaded(
    loaded: LoadedModel,
    weights: str,
    quantizer: str,
    progress: ExportProgress,
    data: str | None = None,
    head_bits: str = ExportConfig.head_bits,
) -> LoadedModel:
    """`quantized`, with a progress bar, and a note on each kind of matrix that is not in low bits.

    Args:
        data: the text for a quantizer that `reads_text`.
        head_bits: with int4, see `with_head`.

    Raises DataError if the text cannot be read or is too short.
    """
    if weights == INTEGER:
        loaded = in_integers(loaded, data, progress)
    elif weights in ("int4", "int8"):
        tokens = None
        if reads_text(int(weights.removeprefix("int")), quantizer):
            assert data is not None
            loaded = held_in_memory(loaded, f"{quantizer} runs text through it", progress.note)
            with progress.phase(f"read {data}"):
                tokens = calibration_tokens(data, loaded.tokenizer, loaded.positions, progress.note)
                check_embedded(int(tokens.max()), loaded.model, data)
        with progress.steps(f"quantize to {weights} by {quantizer}") as steps:
            loaded = quantized(loaded, weights, quantizer, steps.reach, tokens)
        if weights == "int4":
            with progress.phase("measure the head"):
                loaded = with_head(loaded, head_bits, progress.note)
    for note in loaded.notes:
        progress.note(note)
    return loaded


def _imported(draft_head: str, loaded: LoadedModel, progress: ExportProgress) -> MeasuredDrafter:
    with progress.steps("measure the draft head on replies") as steps:
        return import_drafter(draft_head, loaded, progress.note, steps.reach)


def _calibrator() -> Callable[..., AbstractContextManager[ExitCalibration]]:
    """The entry point of tide_calibrate (it imports the exporter, not the reverse). Raises CalibrationError if it is missing."""
    for found in entry_points(group="tide_export.calibrate"):
        try:
            return found.load()
        except ModuleNotFoundError as error:
            missing = error.name
            raise CalibrationError(
                f"--data calibrates the model first, which needs {missing}; install it with: pip install 'tide-llm[calibrate]'"
            ) from error
    raise CalibrationError("--data calibrates the model first, and no calibrator is installed; pip install 'tide-llm[calibrate]'")


def _incomplete(out: str | Path, manifest: Manifest, failures: dict[str, str], config: ExportConfig) -> str:
    return (
        f"{out} was written with {', '.join(manifest.targets)}, but without {', '.join(failures)}: "
        f"{'; '.join(failures.values())}. Here can be built in {config.dtype}: {', '.join(buildable(config.dtype, config.kv))}"
    )


def write_bundle(
    loaded: LoadedModel,
    directory: Path,
    config: ExportConfig,
    progress: ExportProgress,
    calibration: ExitCalibration | OwnExits | None = None,
    traced: TracedModel | None = None,
    drafter: MeasuredDrafter | None = None,
) -> tuple[Manifest, list[Check]]:
    """Write and verify the bundle of an `ExportRun`; returns its manifest and the checks.

    ``traced``: a trace of the model to reuse; it is modified in place.
    """
    run = ExportRun(loaded, directory, config, progress, calibration, drafter)
    manifest, checks = run.write(traced).verified(directory)
    return run.hashed(manifest), checks
