"""The export, phase by phase: load → trace → lower and cut → write → verify → rename into place."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import entry_points, version
from pathlib import Path

from tide_runtime.backends.onnxruntime.distribution import distribution
from tide_runtime.bundle.calibration import DraftHeadInfo
from tide_runtime.bundle.manifest import (
    MANIFEST_NAME,
    NOT_YET,
    SCHEMA_VERSION,
    Manifest,
    ModelInfo,
)
from tide_runtime.errors import CalibrationError, IncompleteBundleError, ParamsError
from tide_runtime.machine_cache import cache_folder

from tide_export.bundle_writer import check_room, hash_files, list_files, new_directory, write_tokenizer
from tide_export.calibration.exit_calibration import ExitCalibration, read_exit_calibration
from tide_export.chosen_weights import chosen_weights
from tide_export.config import AUTO, ExportConfig, checkpoint_layers, reads_text
from tide_export.drafters.base import MeasuredDrafter
from tide_export.drafters.draft_graph import trace_drafter
from tide_export.drafters.importing import check_draft_head, import_drafter
from tide_export.drafters.own import OwnHead
from tide_export.drafters.rounded import RoundedDrafter
from tide_export.graphs.cut import LoweredModel
from tide_export.graphs.exit_gate import OwnExits, own_exits, own_threshold
from tide_export.graphs.exit_graphs import exit_graph_model, score_graph_model
from tide_export.load import fingerprint, held_in_memory, load_model, quantized, weight_bytes
from tide_export.model.embedding_model import check_options_of_embedding
from tide_export.model.long_rotary import long_rotary_from
from tide_export.model.probe import check_cuts, uncut_reason
from tide_export.passes.base import LoweringContext
from tide_export.progress import ExportProgress
from tide_export.quantize.gptq import calibration_tokens
from tide_export.quantize.head_bits import with_head
from tide_export.quantize.integer_weights import in_integers, write_smoothing
from tide_export.quantize.kv_scales import kv_scales
from tide_export.quantize.layerwise import layer_by_layer
from tide_export.sources.generation_defaults import generation_info, generation_note
from tide_export.sources.loaded_model import LoadedModel
from tide_export.sources.source_tokenizer import check_embedded
from tide_export.targets.base import BuildJob, Target
from tide_export.targets.build_targets import BuiltTargets, Cuts, build_targets
from tide_export.targets.choice import buildable, check_options, choose_targets, why_not_here, without_long_rotary
from tide_export.targets.engine_cache import EngineCache
from tide_export.targets.engines import step_profiles
from tide_export.targets.lower import explain
from tide_export.trace.trace_model import TracedModel, trace
from tide_export.verify.checks import check_loaded
from tide_export.verify.verify_bundle import Check
from tide_export.verify.verify_targets import Verified, unverified, verify_targets
from tide_export.weights.quantized_weight import INTEGER

_TOOLS = ("tide-llm", "torch", "transformers", "onnx", "onnxscript", "onnx-ir")
_DEFAULT_MAX_SEQ_LEN = 4096


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
        written = write_unverified(loaded, directory, config, progress, calibration, drafter=drafter)
        manifest = written.manifest if in_place is not None else written.verified(directory, progress)[0]
        manifest = _hashed(manifest, directory, progress)
    if in_place is not None:
        manifest = _verified_in_place(replace(written, manifest=manifest), Path(out), progress, in_place)
    if progress.failures:
        raise IncompleteBundleError(_incomplete(out, manifest, progress.failures, config))
    return manifest


def _verified_in_place(written: Written, out: Path, progress: ExportProgress, in_place: Callable[[], None]) -> Manifest:
    in_place()
    try:
        manifest = written.verified(out, progress)[0]
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    _write_manifest(manifest, out)
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

            def advance(done: int, total: int) -> None:
                if done == 1:
                    steps.begin(total)
                steps.reach(done)

            loaded = quantized(loaded, weights, quantizer, advance, tokens)
        if weights == "int4":
            with progress.phase("measure the head"):
                loaded = with_head(loaded, head_bits, progress.note)
    for note in loaded.notes:
        progress.note(note)
    return loaded


def _imported(draft_head: str, loaded: LoadedModel, progress: ExportProgress) -> MeasuredDrafter:
    with progress.steps("measure the draft head on replies") as steps:

        def advance(done: int, all_tokens: int) -> None:
            if done == 1:
                steps.begin(all_tokens)
            steps.reach(done)

        return import_drafter(draft_head, loaded, progress.note, advance)


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
    """`write_unverified`, and verify the bundle; returns its manifest and the checks."""
    written = write_unverified(loaded, directory, config, progress, calibration, traced, drafter)
    manifest, checks = written.verified(directory, progress)
    return _hashed(manifest, directory, progress), checks


@dataclass(frozen=True)
class Written:
    """A bundle whose files are whole and whose targets are not verified yet; its ``manifest``, and what it was made of."""

    manifest: Manifest
    loaded: LoadedModel
    config: ExportConfig
    context: LoweringContext
    calibration: ExitCalibration | OwnExits | None
    head: _DraftHead | None

    def verified(self, directory: Path, progress: ExportProgress) -> tuple[Manifest, list[Check]]:
        """The manifest of the bundle in ``directory`` with what its targets were verified on, and the checks.

        Raises VerificationError where the bundle differs from the model.
        """
        if not self.config.verify:
            return self._with(unverified(self.manifest.targets, "the export had --no-verify")), []
        calibration, loaded = self.calibration, self.loaded
        exits = calibration.tensors if calibration is not None and calibration.info.exits else None
        drafter = self.head.rounded if self.head is not None else None
        kv_scales = self.context.kv_scales
        verified = verify_targets(loaded, directory, self.config.dtype, progress, kv_scales, drafter, exits)
        manifest = self._with(verified)
        if loaded.rounding is not None:
            with progress.phase("measure what rounding costs"):
                manifest = replace(manifest, rounding=loaded.rounding())
        return manifest, verified.checks

    def _with(self, verified: Verified) -> Manifest:
        targets = {name: replace(info, verified=verified.on[name]) for name, info in self.manifest.targets.items()}
        return replace(self.manifest, targets=targets)


def write_unverified(
    loaded: LoadedModel,
    directory: Path,
    config: ExportConfig,
    progress: ExportProgress,
    calibration: ExitCalibration | OwnExits | None = None,
    traced: TracedModel | None = None,
    drafter: MeasuredDrafter | None = None,
) -> Written:
    """Fill ``directory`` (existing, empty) with the bundle of a model in memory, with the exits of its ``calibration``, or of the
    model's own exit gate.

    ``traced``: a trace of the model to reuse; it is modified in place. ``drafter``: the draft head; None: the calibration's.
    Targets that could not be built are in ``progress.failures``; raises TargetError if none could be built.
    """
    check_room(directory, weight_bytes(loaded))
    if (note := generation_note(loaded)) is not None:
        progress.note(note)
    slots = _cache_slots(loaded, config, progress.note)
    original = long_rotary_from(loaded.model)
    long_from = original if original is not None and original < slots else None
    targets, refused = choose_targets(config.targets, config.dtype, config.kv, loaded.mixed_layers)
    targets, without = without_long_rotary(targets, long_from)
    refused |= without
    for name, error in refused.items():
        progress.failed(name, str(error))
    context = LoweringContext(slots, loaded.quantized, long_rotary_from=long_from)
    if calibration is None and config.checkpoints == "auto":
        calibration = own_exits(loaded)
    cuts = _cuts(loaded, config, calibration)
    head = _draft_head(calibration, drafter)
    _check_drafter(head, config, targets)
    if config.kv == "int8":
        with progress.phase("measure the range of keys and values"), layer_by_layer(loaded.model, loaded.parameters):
            scales = kv_scales(loaded.model, loaded.layers, context.max_seq_len)
            context = replace(context, kv_scales=scales)
    if traced is None:
        with progress.phase("trace"):
            repeat = config.verify and any(why_not_here(target) is None for target in targets)
            traced = trace(loaded.model, loaded.streamed, repeat, loaded.layers)
    if head is not None:
        with progress.phase("trace the draft head"):
            cuts = replace(cuts, draft=trace_drafter(head.rounded, loaded.model, traced.num_layers))
    with tempfile.TemporaryDirectory(prefix=".workspace.", dir=directory) as workspace:
        job = _job(directory, Path(workspace), config, context, progress, calibration)
        with closing(job):
            built = build_targets(traced, targets, cuts, context, job, partial(_explain, config, progress))
    write_smoothing(loaded.quantized, directory)
    manifest = _manifest(loaded, traced, built, directory, config, context, calibration, head)
    _write_manifest(manifest, directory)
    return Written(manifest, loaded, config, context, calibration, head)


def _hashed(manifest: Manifest, directory: Path, progress: ExportProgress) -> Manifest:
    with progress.phase("hash"):
        manifest = replace(manifest, files=hash_files(manifest.files, directory))
    _write_manifest(manifest, directory)
    return manifest


def _write_manifest(manifest: Manifest, directory: Path) -> None:
    """In one step: an engine may be reading it."""
    new = directory / f".{MANIFEST_NAME}"
    new.write_text(manifest.to_json(), encoding="utf-8")
    new.replace(directory / MANIFEST_NAME)


def _job(
    directory: Path,
    workspace: Path,
    config: ExportConfig,
    context: LoweringContext,
    progress: ExportProgress,
    calibration: ExitCalibration | OwnExits | None,
) -> BuildJob:
    drafts = calibration.info.draft_limit if calibration is not None else 0
    profiles = step_profiles(config.max_batch, drafts, context.max_seq_len)
    cache = EngineCache(cache_folder("engines"))
    return BuildJob(directory, workspace, config.dtype, profiles, progress, cache, config.force_rebuild, config.trt)


def _explain(config: ExportConfig, progress: ExportProgress, lowered: LoweredModel) -> None:
    if config.explain:
        for line in explain(lowered.reports):
            progress.note(line)


def _cuts(loaded: LoadedModel, config: ExportConfig, calibration: ExitCalibration | OwnExits | None) -> Cuts:
    """Layers run before each cut, and the graphs of the exits. Raises CalibrationError if the calibration is of another model."""
    if calibration is None:
        # Tokens never stop between recurrent layers, nor those of an embedding, so cuts would only cost launches.
        needs_no_cut = loaded.is_recurrent or loaded.embedding is not None
        whole = config.checkpoints == "auto" and (needs_no_cut or uncut_reason(loaded.model, loaded.layers))
        checkpoints = checkpoint_layers("none" if whole else config.checkpoints, loaded.num_layers, loops=loaded.loops)
        if checkpoints:
            check_cuts(loaded.model, loaded.layers)
        return Cuts(checkpoints)
    check_cuts(loaded.model, loaded.layers)
    calibration.check(loaded)
    exits = calibration.info.exits
    tensors = calibration.tensors
    text = loaded.model.config.get_text_config()
    graphs = [exit_graph_model(info, tensors, text.hidden_size, config.dtype) for info in exits if info.graph_outputs()]
    scored = [info for info in exits if info.scores_logits]
    graphs += [score_graph_model(info, tensors, text.hidden_size, text.vocab_size, config.dtype) for info in scored]
    checkpoints = checkpoint_layers(config.checkpoints, loaded.num_layers, calibration.info)
    return Cuts(checkpoints, graphs)


@dataclass(frozen=True)
class _DraftHead:
    """A draft head and its entry in the manifest."""

    rounded: RoundedDrafter
    info: DraftHeadInfo


def _draft_head(calibration: ExitCalibration | OwnExits | None, measured: MeasuredDrafter | None) -> _DraftHead | None:
    """The one that was imported and measured, else the calibration's, if there is one."""
    if measured is not None:
        drafter = measured.drafter
        vocabulary = len(measured.drafter.vocabulary)
        shares, origin = (measured.acceptance, measured.classes), (measured.source, measured.sha256)
        info = DraftHeadInfo([*drafter.taps], drafter.width, vocabulary, *shares, drafter.kind, drafter.kv, *origin)
        return _DraftHead(RoundedDrafter(drafter), info)
    if calibration is None or calibration.info.draft_head is None:
        return None
    middle, final = calibration.info.draft_head.layers
    return _DraftHead(RoundedDrafter(OwnHead(calibration.draft, (middle, final))), calibration.info.draft_head)


def _check_drafter(head: _DraftHead | None, config: ExportConfig, targets: Sequence[Target]) -> None:
    """Raise ParamsError where the bundle would lack a draft head that was asked for, or one with a cache cannot be compiled."""
    if head is None or head.info.kind == "own":
        return
    if not any(target.drafts for target in targets):
        names = ", ".join(target.name for target in targets)
        raise ParamsError(f"a draft head was given, and only the targets cpu and torch run it, not {names}; add --target cpu")
    if config.kv == "int8" and head.info.kv is not None:
        raise ParamsError("the draft head has keys and values of its own, which are not rounded to int8; leave out --kv int8")


def _manifest(
    loaded: LoadedModel,
    traced: TracedModel,
    built: BuiltTargets,
    directory: Path,
    config: ExportConfig,
    context: LoweringContext,
    calibration: ExitCalibration | OwnExits | None,
    head: _DraftHead | None,
) -> Manifest:
    """The manifest, its files not hashed yet; writes tokenizer and calibration next to the targets' files."""
    if calibration is not None:
        calibration.keep_report(directory)
    vocab = traced.model.graph.outputs[0].shape[-1]
    if loaded.embedding is not None:
        vocab = loaded.model.get_input_embeddings().weight.shape[0]
    return Manifest(
        schema=SCHEMA_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tools=dict([*((name, version(name)) for name in _TOOLS), distribution()]),
        model=_model_info(loaded, traced, int(vocab)),
        dtype=config.dtype,
        kv_dtype=None if config.kv == "model" else config.kv,
        weights=dict(Counter(weight.origin for weight in loaded.quantized.values())),
        head=loaded.head,
        max_seq_len=context.max_seq_len,
        long_rotary_from=context.long_rotary_from,
        checkpoints=[g.layers[1] for g in built.graphs if g.layers is not None][:-1],
        layers=list(traced.layers),
        graphs=built.graphs,
        targets={name: replace(info, verified=NOT_YET) for name, info in built.targets.items()},
        generation=generation_info(loaded),
        calibration=replace(calibration.info, draft_head=None) if calibration is not None else None,
        draft_head=head.info if head is not None else None,
        embedding=loaded.embedding,
        tokenizer=write_tokenizer(loaded.tokenizer, directory) if loaded.tokenizer is not None else None,
        files=list_files(directory),
    )


def _cache_slots(loaded: LoadedModel, config: ExportConfig, note: Callable[[str], None]) -> int:
    limit = loaded.positions or _DEFAULT_MAX_SEQ_LEN
    if config.max_seq_len is not None and config.max_seq_len > limit:
        raise ParamsError(f"max_seq_len is {config.max_seq_len}, the model knows {limit} positions; set it to at most {limit}")
    if config.max_seq_len is None and limit > _DEFAULT_MAX_SEQ_LEN:
        note(f"the context is {_DEFAULT_MAX_SEQ_LEN} tokens of the model's {limit}; --max-seq-len takes more")
    return config.max_seq_len or min(limit, _DEFAULT_MAX_SEQ_LEN)


def _model_info(loaded: LoadedModel, traced: TracedModel, vocab: int) -> ModelInfo:
    model = loaded.model
    text = loaded.model.config.get_text_config()
    return ModelInfo(
        name=loaded.name,
        source=loaded.source,
        revision=loaded.revision,
        architecture=type(model).__name__,
        model_type=model.config.model_type,
        num_layers=traced.num_layers,
        hidden_size=text.hidden_size,
        vocab_size=vocab,
        parameters=model.num_parameters(),
        max_position_embeddings=loaded.positions or 0,
        fingerprint=fingerprint(loaded),
        loops=loaded.loops,
        exit_threshold=own_threshold(loaded.model),
        code=dict(loaded.code),
    )
