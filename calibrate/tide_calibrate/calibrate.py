"""The calibration, phase by phase: load → read → (reference) → capture → train → trace → costs → place → certify → measure."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tide_calibrate.capture.reference import ReferenceTokens, capture_reference, check_same_tokens
from tide_calibrate.config import OWN_REFERENCE, CalibrationConfig
from tide_calibrate.costs.measure import load_costs
from tide_calibrate.costs.model_costs import measure_model_costs, nominal_costs
from tide_calibrate.measured_target import CPU, measured_target
from tide_calibrate.placed_exit import HOST, LearnedModel
from tide_calibrate.text.documents import SplitText, read_text
from tide_calibrate.torch_device import checked_device, model_on
from tide_calibrate.train import capture_bundle, learn
from tide_export.bundle_writer import new_directory
from tide_export.calibration.calibration_file import CALIBRATION_NAME, CalibrationFile
from tide_export.calibration.exit_calibration import check_can_exit
from tide_export.export import quantize_loaded
from tide_export.load import load_model
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel
from tide_export.targets.choice import AUTO


def calibrate(
    source: str,
    data: str,
    out: str | Path,
    config: CalibrationConfig | None = None,
    *,
    also: Mapping[float, str | Path] | None = None,
    costs: str = "measure",
    target: str = AUTO,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
    keep_capture: bool = False,
    force: bool = False,
    progress: ExportProgress | None = None,
) -> CalibrationFile:
    """Calibrate the model in directory, hub id or GGUF file ``source`` on the text in ``data`` and write the directory ``out``.

    Args:
        also: further ε → directory; these calibrations differ only in their certified thresholds.
        costs: ``measure`` on this machine, ``none``, or a file that an earlier calibration wrote.
        target: the target that is measured; ``auto``: see `measured_target`.
        tokenizer: the tokenizer in place of the model's own; see `tide_export.sources.source_tokenizer`.
        keep_capture: keep ``<out>.work``, the captured states. An interrupted run keeps it too, and the next run with the same
            model, text and candidates resumes from it.
        force: replace an existing calibration, and capture anew.

    Raises a child of TideError when model, text, costs, target or options cannot be used, or ``out`` exists; ``out`` is then
    unchanged.
    """
    config = config or CalibrationConfig()
    progress = progress or ExportProgress(quiet=True)
    out = Path(out)
    also = also or {}
    configs = [config, *(replace(config, max_disagreement=epsilon) for epsilon in also)]
    device = checked_device(config.device)
    cost_table = load_costs(Path(costs)) if costs not in ("measure", "none") else None
    work = out.with_name(f"{out.name}.work")
    with ExitStack() as stack:
        staged = (new_directory(path, force, "calibration", CALIBRATION_NAME) for path in [out, *map(Path, also.values())])
        directories = [stack.enter_context(directory) for directory in staged]
        if force:
            shutil.rmtree(work, ignore_errors=True)
        load = partial(load_model, source, config.dtype, revision, trust_remote_code, config.weights, tokenizer)
        with progress.phase(f"load {source}"):
            loaded = load()
        check_can_exit(loaded)
        on_gpu = device.type == "cuda"
        measured = measured_target(config.dtype, target, loaded.target_restriction, on_gpu) if costs == "measure" else None
        with progress.phase(f"read {data}"):
            text = read_text(data, loaded, config, progress.note)
        reference = None
        if config.reference == OWN_REFERENCE and config.dtype == "fp32":  # as loaded, the model is the original
            reference = _reference_tokens(loaded, text, work, device, progress)
        elif config.reference:
            used = loaded.tokenizer
            del loaded  # one model in memory at a time
            is_own = config.reference == OWN_REFERENCE
            original_source = source if is_own else config.reference
            with progress.phase(f"load the reference {original_source}"):
                loaded = load_model(original_source, "fp32", revision if is_own else None, trust_remote_code, tokenizer=tokenizer)
            check_same_tokens(loaded, source, used, text.windows)
            reference = _reference_tokens(loaded, text, work, device, progress)
            del loaded
            with progress.phase(f"load {source}"):
                loaded = load()
        loaded = quantize_loaded(loaded, config.weights, config.quantizer, progress, data)
        stack.enter_context(model_on(loaded, device))
        shared = measured == CPU and not loaded.quantized  # step costs are those of low-bit products, which do not capture
        with capture_bundle(loaded, text, config, directories[0], shared) as bundle:
            learned = learn(loaded, text, work, config, progress, bundle)
            if measured is not None:
                with progress.phase(f"measure step costs of {measured}"), model_on(loaded, HOST):  # where the exporter reads it
                    own = bundle if shared else None
                    cost_table = measure_model_costs(loaded, config.dtype, directories[0], measured, own)
            info = text.info(data, config.seed)
            assumed = cost_table or nominal_costs(loaded)
            model = LearnedModel(loaded, info, learned, reference, cost_table, measured, assumed)
            placed = model.place(config, directories[0], progress)
            files = [placed.certify_and_write(*pair, progress) for pair in zip(configs, directories, strict=True)]
    if not keep_capture:
        shutil.rmtree(work, ignore_errors=True)
    return files[0]


def _reference_tokens(
    original: LoadedModel, text: SplitText, work: Path, device: torch.device, progress: ExportProgress
) -> ReferenceTokens:
    with progress.phase("run the reference"), model_on(original, device):
        windows = text.windows_of({"threshold": None})  # as they are captured, so that both number them alike
        return capture_reference(original, windows, text.split, "threshold", work / "reference", progress)
