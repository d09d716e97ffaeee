"""The exits of a finished calibration as torch runs them, and their traces on texts that the model has generated."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tide_calibrate.capture.capture import capture
from tide_calibrate.config import CalibrationConfig
from tide_calibrate.exit_heads import make_head
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.routers import MlpRouter
from tide_calibrate.text.documents import SPLITS, Windows, read_text
from tide_calibrate.traces.continuations import continue_prompts, generated_tokens
from tide_calibrate.traces.trace import Exit, SplitTrace
from tide_calibrate.train import TrainedExit, captured_layers, trace_exits
from torch import nn

from tide_export.calibration.calibration_file import EXITS_NAME, CalibrationFile, read_calibration
from tide_export.calibration.exits_file import Arrays, read_exits
from tide_export.load import LoadedModel, load_model


def recalled_exits(model: FrozenModel, file: CalibrationFile, directory: Path) -> dict[Exit, TrainedExit]:
    """The exits of the calibration ``file`` in ``directory``; a router that it does not use is an untrained one."""
    weights, exits = read_exits(directory / EXITS_NAME), {}
    for info in file.calibration.exits:
        translator, mlp = weights.translators.get(info.checkpoint), weights.routers.get(info.checkpoint)
        rank = len(translator["down"]) if translator is not None else 1
        head = make_head(info.head, model, info.checkpoint, rank)
        router = MlpRouter(model.hidden_size, len(mlp["down"]) if mlp is not None else 1)
        for module, arrays in ((head.translator, translator), (router, mlp)):
            if module is not None and arrays is not None:
                _fill(module, arrays)
        exits[info.checkpoint, info.head] = TrainedExit(head, router)
    return exits


def _fill(module: nn.Module, arrays: Arrays) -> None:
    module.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})


@dataclass(frozen=True)
class RecalledExits:
    """A demo model with the exits of the calibration in ``directory``."""

    loaded: LoadedModel
    model: FrozenModel
    file: CalibrationFile
    exits: dict[Exit, TrainedExit]

    @staticmethod
    def load(source: Path, directory: Path) -> RecalledExits:
        loaded, file = load_model(str(source), "fp32"), read_calibration(directory)
        model = FrozenModel(loaded.model)
        return RecalledExits(loaded, model, file, recalled_exits(model, file, directory))

    def own_continuations(self) -> SplitTrace:
        """The continuations that the calibration predicted speed on, traced again."""
        config = CalibrationConfig(**self.file.config)
        text = read_text(self.file.data.source, self.loaded, config, note=lambda _: None)
        own, prompts = continue_prompts(self.loaded.model, text.windows, text.split, config.prompts, config.new_tokens)
        return self._trace(own, prompts)

    def texts(self, texts: Sequence[Sequence[int]], prompt: int) -> SplitTrace:
        """``texts`` of which the model wrote all but the first ``prompt`` tokens."""
        count, lengths = len(texts), np.array([len(text) for text in texts], np.int32)
        tokens = np.zeros((count, lengths.max()), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        return self._trace(Windows(tokens, lengths, np.arange(count, dtype=np.int32)), np.full(count, prompt, np.int32))

    def _trace(self, own: Windows, prompts: NDArray[np.int32]) -> SplitTrace:
        split = np.full(int(own.document.max()) + 1, SPLITS.index("test"), np.int8)
        layers = captured_layers(list(self.exits), self.model.num_layers)
        with tempfile.TemporaryDirectory() as work:
            captured = capture(self.loaded, own, split, layers, Path(work, "capture"))
            return generated_tokens(trace_exits(self.model, captured, "test", self.exits), own, prompts)
