"""One export: what a bundle is made of, and its way through trace, lowering, targets and manifest into a folder."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from tide_runtime.backends.onnxruntime.distribution import distribution
from tide_runtime.bundle.calibration import DraftHeadInfo
from tide_runtime.bundle.manifest import DTYPES, MANIFEST_NAME, NOT_YET, SCHEMA_VERSION, Manifest, ModelInfo
from tide_runtime.errors import ParamsError
from tide_runtime.machine_cache import CachedFiles, cache_folder

from tide_export.bundle_writer import check_room, hash_files, list_files, write_tokenizer
from tide_export.calibration.exit_calibration import ExitCalibration
from tide_export.config import ExportConfig, checkpoint_layers
from tide_export.drafters.base import MeasuredDrafter
from tide_export.drafters.draft_graph import trace_drafter
from tide_export.drafters.own import OwnHead
from tide_export.drafters.rounded import RoundedDrafter
from tide_export.graphs.cut import LoweredModel
from tide_export.graphs.exit_gate import OwnExits, own_exits, own_threshold
from tide_export.graphs.exit_graphs import exit_graph_model, score_graph_model
from tide_export.load import fingerprint, weight_bytes
from tide_export.model.long_rotary import long_rotary_from
from tide_export.model.probe import check_cuts, uncut_reason
from tide_export.passes.base import LoweringContext
from tide_export.progress import ExportProgress
from tide_export.quantize.integer_weights import write_smoothing
from tide_export.quantize.kv_scales import KVScales, kv_scales
from tide_export.quantize.layerwise import layer_by_layer
from tide_export.sources.generation_defaults import generation_info, generation_note
from tide_export.sources.loaded_model import LoadedModel
from tide_export.targets.base import BuildJob, Target
from tide_export.targets.build_targets import BuiltTargets, Cuts, build_targets
from tide_export.targets.choice import choose_targets, why_not_here, without_long_rotary
from tide_export.targets.engines import step_profiles
from tide_export.targets.lower import explain
from tide_export.trace.trace_model import TracedModel, trace
from tide_export.verify.check_results import Check
from tide_export.verify.verify_targets import Verified, unverified, verify_targets

_TOOLS = ("tide-llm", "torch", "transformers", "onnx", "onnxscript", "onnx-ir")
_DEFAULT_MAX_SEQ_LEN = 4096


@dataclass(frozen=True)
class _DraftHead:
    """A draft head and its entry in the manifest."""

    rounded: RoundedDrafter
    info: DraftHeadInfo


@dataclass(frozen=True)
class ExportRun:
    """The export of a model in memory to ``directory`` (existing, empty).

    Args:
        calibration: whose exits the bundle gets; None: those of the model's own exit gate, if it has one.
        drafter: the draft head; None: the calibration's.
    """

    loaded: LoadedModel
    directory: Path
    config: ExportConfig
    progress: ExportProgress
    calibration: ExitCalibration | OwnExits | None = None
    drafter: MeasuredDrafter | None = None

    def write(self, traced: TracedModel | None = None) -> Written:
        """Fill the directory with the bundle.

        ``traced``: a trace of the model to reuse; it is modified in place.
        Targets that could not be built are in ``progress.failures``; raises TargetError if none could be built.
        """
        loaded = self.loaded
        config = self.config
        phase = self.progress.phase
        check_room(self.directory, weight_bytes(loaded))
        if (note := generation_note(loaded)) is not None:
            self.progress.note(note)
        slots = self._cache_slots()
        original = long_rotary_from(loaded.model)
        long_from = original if original is not None and original < slots else None
        targets, refused = choose_targets(config.targets, config.dtype, config.kv, loaded.target_restriction)
        targets, without = without_long_rotary(targets, long_from)
        for name, error in (refused | without).items():
            self.progress.failed(name, str(error))
        context = LoweringContext(slots, loaded.quantized, long_rotary_from=long_from)
        cuts = self._cuts()
        self._check_draft_head(targets)
        if config.kv == "int8":
            with phase("measure the range of keys and values"), layer_by_layer(loaded.model, loaded.parameters):
                context = replace(context, kv_scales=kv_scales(loaded.model, loaded.layers, slots))
        if traced is None:
            with phase("trace"):
                repeat = config.verify and any(why_not_here(target) is None for target in targets)
                traced = trace(loaded.model, loaded.streamed, repeat, loaded.layers)
        if self.draft_head is not None:
            with phase("trace the draft head"):
                cuts = replace(cuts, draft=trace_drafter(self.draft_head.rounded, loaded.model, traced.num_layers))
        folder = tempfile.TemporaryDirectory(prefix=".workspace.", dir=self.directory)
        with folder as workspace, closing(self._job(Path(workspace), slots)) as job:
            built = build_targets(traced, targets, cuts, context, job, self._explain)
        write_smoothing(loaded.quantized, self.directory)
        manifest = self._manifest(traced, built, context)
        write_manifest(manifest, self.directory)
        return Written(self, manifest, context.kv_scales)

    def hashed(self, manifest: Manifest) -> Manifest:
        """``manifest`` with the SHA-256 of the files in the directory, where it is written."""
        with self.progress.phase("hash"):
            manifest = replace(manifest, files=hash_files(manifest.files, self.directory))
        write_manifest(manifest, self.directory)
        return manifest

    @cached_property
    def exits(self) -> ExitCalibration | OwnExits | None:
        """The exits of the calibration, or of the model's own exit gate."""
        own = self.calibration is None and self.config.checkpoints == "auto"
        return own_exits(self.loaded) if own else self.calibration

    @cached_property
    def draft_head(self) -> _DraftHead | None:
        """The imported and measured drafter, else the calibration's draft head; None: there is none."""
        if (measured := self.drafter) is not None:
            drafter = measured.drafter
            vocabulary = len(measured.drafter.vocabulary)
            shares, origin = (measured.acceptance, measured.classes), (measured.source, measured.sha256)
            info = DraftHeadInfo([*drafter.taps], drafter.width, vocabulary, *shares, drafter.kind, drafter.kv, *origin)
            return _DraftHead(RoundedDrafter(drafter), info)
        if self.exits is None or self.exits.info.draft_head is None:
            return None
        middle, final = self.exits.info.draft_head.layers
        return _DraftHead(RoundedDrafter(OwnHead(self.exits.draft, (middle, final))), self.exits.info.draft_head)

    def _cache_slots(self) -> int:
        limit = self.loaded.positions or _DEFAULT_MAX_SEQ_LEN
        slots = self.config.max_seq_len
        if slots is not None and slots > limit:
            raise ParamsError(f"max_seq_len is {slots}, the model knows {limit} positions; set it to at most {limit}")
        if slots is None and limit > _DEFAULT_MAX_SEQ_LEN:
            self.progress.note(f"the context is {_DEFAULT_MAX_SEQ_LEN} tokens of the model's {limit}; --max-seq-len takes more")
        return slots or min(limit, _DEFAULT_MAX_SEQ_LEN)

    def _cuts(self) -> Cuts:
        """Layers run before each cut, and the graphs of the exits. Raises CalibrationError if they are of another model."""
        loaded = self.loaded
        spec = self.config.checkpoints
        calibration = self.exits
        if calibration is None:
            # Tokens never stop between recurrent layers, nor those of an embedding, so cuts would only cost launches.
            needs_no_cut = loaded.is_recurrent or loaded.embedding is not None
            whole = spec == "auto" and (needs_no_cut or uncut_reason(loaded.model, loaded.layers))
            checkpoints = checkpoint_layers("none" if whole else spec, loaded.num_layers, loops=loaded.loops)
            if checkpoints:
                check_cuts(loaded.model, loaded.layers)
            return Cuts(checkpoints)
        check_cuts(loaded.model, loaded.layers)
        calibration.check(loaded)
        exits = calibration.info.exits
        text = loaded.model.config.get_text_config()
        tensors = calibration.tensors
        dtype = self.config.dtype
        graphs = [exit_graph_model(info, tensors, text.hidden_size, dtype) for info in exits if info.graph_outputs()]
        scored = [info for info in exits if info.scores_logits]
        graphs += [score_graph_model(info, tensors, text.hidden_size, text.vocab_size, dtype) for info in scored]
        return Cuts(checkpoint_layers(spec, loaded.num_layers, calibration.info), graphs)

    def _check_draft_head(self, targets: Sequence[Target]) -> None:
        """Raise ParamsError where the bundle would lack one that was asked for, or one with a cache cannot be compiled."""
        head = self.draft_head
        if head is None or head.info.kind == "own":
            return
        if not any(target.drafts for target in targets):
            names = ", ".join(target.name for target in targets)
            raise ParamsError(f"a draft head was given, and only the targets cpu and torch run it, not {names}; add --target cpu")
        if self.config.kv == "int8" and head.info.kv is not None:
            raise ParamsError("the draft head has keys and values of its own, which are not rounded to int8; leave out --kv int8")

    def _job(self, workspace: Path, slots: int) -> BuildJob:
        config = self.config
        drafts = self.exits.info.draft_limit if self.exits is not None else 0
        profiles = step_profiles(config.max_batch, drafts, slots)
        cache = CachedFiles(cache_folder("engines"))
        rebuild = config.force_rebuild
        return BuildJob(self.directory, workspace, config.dtype, profiles, self.progress, cache, rebuild, config.trt)

    def _explain(self, lowered: LoweredModel) -> None:
        if self.config.explain:
            for line in explain(lowered.reports):
                self.progress.note(line)

    def _manifest(self, traced: TracedModel, built: BuiltTargets, context: LoweringContext) -> Manifest:
        """The manifest, its files not hashed yet; writes tokenizer and calibration next to the targets' files."""
        loaded = self.loaded
        calibration = self.exits
        if calibration is not None:
            calibration.keep_report(self.directory)
        vocab = traced.model.graph.outputs[0].shape[-1]
        if loaded.embedding is not None:
            vocab = loaded.model.get_input_embeddings().weight.shape[0]
        return Manifest(
            schema=SCHEMA_VERSION,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tools=dict([*((name, version(name)) for name in _TOOLS), distribution()]),
            model=_model_info(loaded, traced, int(vocab)),
            dtype=self.config.dtype,
            kv_dtype=None if self.config.kv == "model" else self.config.kv,
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
            draft_head=self.draft_head.info if self.draft_head is not None else None,
            embedding=loaded.embedding,
            tokenizer=write_tokenizer(loaded.tokenizer, self.directory) if loaded.tokenizer is not None else None,
            files=list_files(self.directory),
        )


@dataclass(frozen=True)
class Written:
    """A bundle whose files are whole and whose targets are not verified yet."""

    run: ExportRun
    manifest: Manifest
    kv_scales: Mapping[int, KVScales]

    def verified(self, directory: Path) -> tuple[Manifest, list[Check]]:
        """The manifest of the bundle, which lies in ``directory`` by now, with what its targets were verified on; the checks.

        Raises VerificationError where the bundle differs from the model.
        """
        run = self.run
        if not run.config.verify:
            return self._with(unverified(self.manifest.targets, "the export had --no-verify")), []
        exits = run.exits.tensors if run.exits is not None and run.exits.info.exits else None
        drafter = run.draft_head.rounded if run.draft_head is not None else None
        verified = verify_targets(run.loaded, directory, run.config.dtype, run.progress, self.kv_scales, drafter, exits)
        manifest = self._with(verified)
        if run.loaded.rounding is not None:
            with run.progress.phase("measure what rounding costs"):
                manifest = replace(manifest, rounding=run.loaded.rounding())
        return manifest, verified.checks

    def _with(self, verified: Verified) -> Manifest:
        targets = {name: replace(info, verified=verified.on[name]) for name, info in self.manifest.targets.items()}
        return replace(self.manifest, targets=targets)


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Replace the manifest of ``directory`` by renaming, because an engine may be reading it."""
    new = directory / f".{MANIFEST_NAME}"
    new.write_text(manifest.to_json(), encoding="utf-8")
    new.replace(directory / MANIFEST_NAME)


def _model_info(loaded: LoadedModel, traced: TracedModel, vocab: int) -> ModelInfo:
    model = loaded.model
    text = loaded.model.config.get_text_config()
    as_stored = loaded.weights in ("source", *DTYPES) or not loaded.weight_files
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
        source_fingerprint="" if as_stored else fingerprint(replace(loaded, weights="source")),
    )
