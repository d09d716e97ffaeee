"""What a calibration learns before it decides anything: states captured, exits trained, and what they say of other text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tide_calibrate.capture import capture
from tide_calibrate.capture_store import Capture
from tide_calibrate.config import CalibrationConfig, candidate_layers
from tide_calibrate.continuations import continue_prompts, generated_tokens
from tide_calibrate.frozen_model import FrozenModel
from tide_calibrate.split_text import SplitText
from tide_calibrate.traces import SplitTrace
from tide_calibrate.train_exits import Exit, TrainedExit, captured_layers, exits_to_train, trace_exits, train_exits
from tide_export.load import LoadedModel
from tide_export.progress import ExportProgress

_TEST_WINDOWS = 40  # for the agreement of all heads: 10,240 tokens, a standard error of at most 0.5%


@dataclass(frozen=True)
class Learned:
    """Trained exits and what they said.

    ``test``: of the test text; ``own_threshold``, ``own_test``: of the model's continuations of prompts from those splits.
    """

    model: FrozenModel
    capture: Capture
    exits: dict[Exit, TrainedExit]
    test: SplitTrace
    own_threshold: SplitTrace
    own_test: SplitTrace


def learn(loaded: LoadedModel, text: SplitText, work: Path, config: CalibrationConfig, progress: ExportProgress) -> Learned:
    """Capture the ``text``'s states in the folder ``work``, and train and trace every exit that ``config`` asks for."""
    model = FrozenModel(loaded.model)
    exits = exits_to_train(candidate_layers(config.candidates, model.num_layers), config.head_kinds, model.num_layers)
    layers = captured_layers(exits, model.num_layers)
    run = partial(capture, hidden_dtype="bfloat16" if config.dtype == "bf16" else "float16", progress=progress)
    with progress.phase(f"capture {text.windows.total_tokens:,} tokens"):
        captured = run(loaded, text.windows, text.split, layers, work / "text")
    with progress.phase(f"let the model continue {config.prompts} prompts"):
        own, prompt_lengths = continue_prompts(loaded.model, text.windows, text.split, config.prompts, config.new_tokens)
        own_captured = run(loaded, own, text.split, layers, work / "continuations")
    with progress.phase(f"train {len(exits)} exits"):
        trained = train_exits(model, captured, exits, config, progress)
    with progress.phase("trace what they say"):
        test = trace_exits(model, captured, "test", trained, _TEST_WINDOWS)
        own_traces = [trace_exits(model, own_captured, split, trained) for split in ("threshold", "test")]
    own_threshold, own_test = (generated_tokens(trace, own, prompt_lengths) for trace in own_traces)
    return Learned(model, captured, trained, test, own_threshold, own_test)
