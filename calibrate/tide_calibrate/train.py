"""The learning phase: capture states, train a head and a router at every candidate exit, and trace them on other text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tide_runtime.errors import ParamsError, UnsupportedModelError

from tide_calibrate.capture.batches import in_batches
from tide_calibrate.capture.capture import capture
from tide_calibrate.capture.compiled_pass import fastest_pass
from tide_calibrate.capture.reference import ReferenceTokens
from tide_calibrate.capture.store import Capture
from tide_calibrate.config import CalibrationConfig, candidate_layers
from tide_calibrate.costs.measure import measuring_checkpoints
from tide_calibrate.draft_head.replies import REPLY_TOKENS, write_replies
from tide_calibrate.draft_head.train import TrainedDraftHead, train_draft_head
from tide_calibrate.exit_heads import parse_kind
from tide_calibrate.exit_heads.sampled_vocabulary import SampledVocabulary
from tide_calibrate.exit_training import TrainedExit, train_exits, with_gates
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.parallel import Check, in_parallel, workers_on
from tide_calibrate.routers import MaxProbability, Router
from tide_calibrate.temporary_bundle import TemporaryBundle
from tide_calibrate.text.documents import SplitName, SplitText, Windows
from tide_calibrate.traces.continuations import continue_prompts, generated_tokens
from tide_calibrate.traces.record import WINDOWS_PER_READ, trace_split, windows_of
from tide_calibrate.traces.trace import Exit, SplitTrace
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

# Weights times tokens. SmolLM2 and 91,000 tokens (1.2e13) take 161 s compiled and 196 s in PyTorch, on two cores; an export 31 s.
_WORTH_COMPILING = 5e12  # where step costs need the export anyway
_WORTH_EXPORTING = 2e13
_TRACE_PARTS = 4  # parts of the windows, so that a single exit is traced in several threads too
_TRAIN_WINDOWS, _MIN_TRAIN_WINDOWS = 128, 32  # captured with the default minutes, and at least
_TEST_WINDOWS = 20  # captured, for the agreement of all heads: 5,120 tokens, a standard error of at most 0.7%
_REPLIES, _MIN_REPLIES = 112, 32  # replies that the draft head learns from: with the default minutes, and at least
_DRAFT_HEAD_SHARE = 0.17  # share of the minutes in which the draft head is trained
_DRAFT_HEAD_STEPS = 400  # training steps at most, with the default minutes


@dataclass(frozen=True)
class Captured:
    """Captures of the text, and of the model's greedy continuations of prompts from the threshold and the test split.

    Args:
        text: some windows of the train and the test split.
        threshold: captures the whole threshold split, on which the certificate rests: needed only where exits pay.
        generated, prompt_lengths: the result of `continue_prompts`.
    """

    text: Capture
    generated: Windows
    prompt_lengths: NDArray[np.int32]
    continuations: Capture
    threshold: Callable[[], Capture]

    def held_out_prompts(self) -> list[list[int]]:
        """Token ids of the prompts from the test split, on which no exit was chosen."""
        held_out = windows_of(self.continuations, "test")
        return [self.generated.tokens[window, : self.prompt_lengths[window]].tolist() for window in held_out]

    def traces(
        self, model: FrozenModel, exits: Mapping[Exit, TrainedExit], vocabulary: SampledVocabulary | None = None
    ) -> tuple[SplitTrace, SplitTrace, SplitTrace]:
        """Traces of the test text, and of the continuations of prompts from the threshold and the test split."""
        run = partial(trace_exits, model, exits=exits, vocabulary=vocabulary)
        test = run(self.text, "test", max_windows=_TEST_WINDOWS)
        generated = [run(self.continuations, split) for split in ("threshold", "test")]
        generated_threshold, generated_test = (generated_tokens(trace, self.prompt_lengths) for trace in generated)
        return test, generated_threshold, generated_test


@dataclass(frozen=True)
class Learned:
    """Trained exits and their traces.

    Args:
        vocabulary: the tokens that exits were trained and traced on; None: all.
        test: trace of the test text.
        own_threshold, own_test: traces of the continuations.
        draft_head: None: the model has no room for one, or the options leave it out.
    """

    model: FrozenModel
    captured: Captured
    exits: dict[Exit, TrainedExit]
    vocabulary: SampledVocabulary | None
    test: SplitTrace
    own_threshold: SplitTrace
    own_test: SplitTrace
    draft_head: TrainedDraftHead | None = None

    def on_whole_vocabulary(self, exits: Iterable[Exit]) -> Learned:
        """A copy in which ``exits`` are traced on all tokens. Traces of the other exits are not changed."""
        chosen = {key: self.exits[key] for key in exits}
        test, own_threshold, own_test = self.captured.traces(self.model, chosen)
        return replace(
            self,
            test=self.test.with_exits(test),
            own_threshold=self.own_threshold.with_exits(own_threshold),
            own_test=self.own_test.with_exits(own_test),
        )


def learn(
    loaded: LoadedModel,
    text: SplitText,
    work: Path,
    config: CalibrationConfig,
    progress: ExportProgress,
    bundle: TemporaryBundle | None = None,
) -> Learned:
    """Capture states of ``text`` in the folder ``work``, then train and trace every exit that ``config`` lists.

    ``bundle``: captured through, see `capture_bundle`; None: PyTorch captures.
    """
    model = FrozenModel(loaded.model, loaded.num_layers)
    exits = exits_to_train(config, model.num_layers, loaded.loops)
    captured = _captured(loaded, text, work, captured_layers(exits, model.num_layers), config, progress, bundle)
    vocabulary = SampledVocabulary.of(captured.text, model)
    if vocabulary is not None:
        progress.note(f"heads and routers learn from a sample of the {vocabulary.size:,} tokens; chosen exits are traced on all")
    with progress.phase(f"train {len(exits)} exits"):
        trained = train_exits(model, captured.text, exits, config, progress, vocabulary)
        trained = with_gates(trained, loaded)
    with progress.phase("trace the exits"):
        learned = Learned(model, captured, trained, vocabulary, *captured.traces(model, trained, vocabulary))
    return replace(learned, draft_head=_draft_head(loaded, model, text, captured.text, config, progress))


def _draft_head(
    loaded: LoadedModel,
    model: FrozenModel,
    text: SplitText,
    captured: Capture,
    config: CalibrationConfig,
    progress: ExportProgress,
) -> TrainedDraftHead | None:
    """Train the draft head on replies that the model writes first; None, with a note, for a model that cannot have one."""
    if config.draft_head is False:
        return None
    share = config.minutes / CalibrationConfig.minutes
    count = max(_MIN_REPLIES, round(_REPLIES * share))
    try:
        with progress.phase(f"write {count} replies"), progress.steps("write", count * REPLY_TOKENS) as bar:
            layer = draft_head_layer(model.num_layers)
            replies = write_replies(loaded, text, [layer, model.num_layers], count, config.seed, bar.advance)
        with progress.phase("train the draft head"), progress.steps("train the draft head") as steps:
            seconds = 60 * config.minutes * _DRAFT_HEAD_SHARE
            max_steps = round(_DRAFT_HEAD_STEPS * share)
            trained = train_draft_head(model, captured, replies, layer, seconds, max_steps, config.seed, steps.reach)
    except UnsupportedModelError as error:
        progress.note(f"no draft head: {error}")
        return None
    right = ", ".join(f"{share:.0%}" for share in trained.info.acceptance)
    progress.note(f"the draft head's 1st, 2nd, … guesses are right: {right}, each after right ones")
    return trained


def draft_head_layer(num_layers: int) -> int:
    """Layers run before the state in the middle that the draft head reads."""
    return max(1, num_layers // 2)


def capture_bundle(
    loaded: LoadedModel, text: SplitText, config: CalibrationConfig, directory: Path, shared: bool
) -> AbstractContextManager[TemporaryBundle | None]:
    """A bundle for ``cpu`` of the dequantised weights with a cut at every captured boundary, in a folder in ``directory``.

    It is also cut where step costs can be measured. None where PyTorch takes no longer: on a GPU, for a small model, little text,
    or not in fp32.

    Args:
        shared: step costs will be measured on it.
    """
    layers = loaded.num_layers
    work = loaded.model.num_parameters() * text.windows.total_tokens
    if (
        config.device != "cpu"
        or config.dtype != "fp32"
        or layers < 2
        or work < (_WORTH_COMPILING if shared else _WORTH_EXPORTING)
    ):
        return nullcontext()
    exits = exits_to_train(config, layers, loaded.loops)
    cuts = {*captured_layers(exits, layers), layers - 1, *measuring_checkpoints(layers)} - {layers}
    return TemporaryBundle(replace(loaded, quantized={}), config.dtype, sorted(cuts), directory, config.window)


def _captured(
    loaded: LoadedModel,
    text: SplitText,
    work: Path,
    layers: Sequence[int],
    config: CalibrationConfig,
    progress: ExportProgress,
    bundle: TemporaryBundle | None,
) -> Captured:
    make_pass = cache(partial(fastest_pass, loaded.model, bundle, layers, progress.note))  # one for both texts
    stored = "bfloat16" if config.dtype == "bf16" else "float16"
    run = partial(capture, candidates=layers, hidden_dtype=stored, make_pass=make_pass, progress=progress)

    def run_text(name: str, windows: Windows) -> Capture:
        with progress.phase(f"capture {windows.total_tokens:,} tokens of {text.windows.total_tokens:,}"):
            return run(loaded, windows, text.split, directory=work / name)

    share = config.minutes / CalibrationConfig.minutes
    max_windows: dict[SplitName, int | None] = {
        "train": max(_MIN_TRAIN_WINDOWS, round(_TRAIN_WINDOWS * share)),
        "test": _TEST_WINDOWS,
    }
    text_capture = run_text("text", text.windows_of(max_windows))
    with progress.phase(f"generate continuations of {config.prompts} prompts"):
        own, prompt_lengths = continue_prompts(loaded.model, text.windows, text.split, config.prompts, config.new_tokens)
        own_capture = run(loaded, own, text.split, directory=work / "continuations")
    threshold = cache(lambda: run_text("threshold", text.windows_of({"threshold": None})))
    return Captured(text_capture, own, prompt_lengths, own_capture, threshold)


def exits_to_train(config: CalibrationConfig, num_layers: int, loops: int = 1) -> list[Exit]:
    """Every head at every candidate where it skips at least one layer.

    Raises ParamsError when a head skips nothing at any candidate.
    """
    candidates = candidate_layers(config.candidates, num_layers, loops)
    kinds = config.head_kinds
    exits = [(layer, kind) for layer in candidates for kind in kinds if layer + parse_kind(kind)[1] < num_layers]
    useless = [kind for kind in kinds if not any(kind == other for _, other in exits)]
    if useless:
        raise ParamsError(
            f"the head {useless[0]} skips nothing after any of the candidates {', '.join(map(str, candidates))} "
            f"of a model of {num_layers} layers; give shallower candidates or a shorter head"
        )
    return exits


def captured_layers(exits: Sequence[Exit], num_layers: int) -> list[int]:
    """Boundaries (in layers run) whose states the heads read, those of the draft head included."""
    tails = {num_layers - parse_kind(kind)[1] for _, kind in exits}
    return sorted({layer for layer, _ in exits} | tails | {draft_head_layer(num_layers), num_layers})


def trace_exits(
    model: FrozenModel,
    capture: Capture,
    split: SplitName,
    exits: Mapping[Exit, TrainedExit],
    max_windows: int | None = None,
    reference: ReferenceTokens | None = None,
    vocabulary: SampledVocabulary | None = None,
) -> SplitTrace:
    """Evaluate ``exits`` on the tokens of ``split``, on at most ``max_windows`` windows; parallel jobs per checkpoint and part.

    Args:
        reference: count agreement with these tokens instead of the full model's.
        vocabulary: exits choose among these tokens; None: among all.
    """
    checkpoints = sorted({layer for layer, _ in exits})
    groups = [{key: trained for key, trained in exits.items() if key[0] == layer} for layer in checkpoints]
    lm_head = model.lm_head  # built before the jobs start, which share it
    windows = windows_of(capture, split, max_windows)
    reads = -(-len(windows) // WINDOWS_PER_READ)
    parts = in_batches(windows, WINDOWS_PER_READ * -(-reads // _TRACE_PARTS))  # whole reads, so that no result depends on parts

    def job(group: Mapping[Exit, TrainedExit], part: NDArray[np.int64], check: Check) -> SplitTrace:
        check()
        heads = {key: trained.head for key, trained in group.items()}
        routers = {key: list[Router]([MaxProbability(), *trained.routers.values()]) for key, trained in group.items()}
        return trace_split(capture, part, lm_head, heads, routers, None, reference, vocabulary)

    jobs = [partial(job, group, part) for group in groups for part in parts]
    traces = list(in_parallel(jobs, workers_on(model.device)))
    joined = [reduce(SplitTrace.joined, traces[i : i + len(parts)]) for i in range(0, len(traces), len(parts))]
    traced = {key: trace for whole in joined for key, trace in whole.exits.items()}
    return replace(joined[0], exits={key: traced[key] for key in exits})
