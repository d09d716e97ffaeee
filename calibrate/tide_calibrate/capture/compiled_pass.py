"""Capture through a bundle's segments: ONNX Runtime runs all layers but the last few, and the LM head.

A segment ends at every captured boundary, so the states are the segments' outputs. No graph of a bundle outputs the state after
the last layer, so PyTorch runs the layers of the last segment, one or two, and the graph ``head`` continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.backends import load_backend
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import HEAD, UNCUT
from tide_runtime.errors import TideError, UnsupportedModelError
from torch import Tensor
from transformers import PreTrainedModel

from tide_calibrate.capture.forward_pass import EagerPass, ForwardPass
from tide_calibrate.capture.writer import BatchWriter
from tide_calibrate.measured_target import CPU
from tide_calibrate.model.frozen import LOGIT_BYTES
from tide_calibrate.model.tail import ModelTail
from tide_calibrate.temporary_bundle import TemporaryBundle

_CHECKED_TOKENS = 32
_TOLERANCE = 1e-4  # relative to the largest logit; both compute in fp32


def fastest_pass(
    model: PreTrainedModel, bundle: TemporaryBundle | None, boundaries: Sequence[int], note: Callable[[str], None]
) -> ForwardPass:
    """The compiled pass, or PyTorch on a GPU, where there is no bundle or, with a note, where it cannot be made or is wrong."""
    if bundle is not None and model.device.type == "cpu":
        try:
            return CompiledPass(bundle.path(), model, boundaries)
        except TideError as error:
            note(f"captured by PyTorch, which takes longer than compiled graphs: {error}")
    return EagerPass(model, boundaries)


class CompiledPass:
    """A bundle of ``model`` whose cuts include all of ``boundaries`` below L.

    Args:
        boundaries: layers run before each state that is captured, 1 … L.
        logit_bytes: size of the fp32 logits that are held at once.

    Raises:
        UnsupportedModelError: the bundle's logits are not those of ``model``.
        BundleError: ONNX Runtime refuses the bundle.
    """

    def __init__(self, bundle: Path, model: PreTrainedModel, boundaries: Sequence[int], logit_bytes: int = LOGIT_BYTES) -> None:
        opened = Bundle.open(bundle, verify=False)  # it was exported by this process
        target = opened.manifest.targets[CPU]
        graphs = {name: file for name, file in target.graphs.items() if name != UNCUT}  # it would hold all weights again
        self._manifest = replace(opened.manifest, targets={CPU: replace(target, graphs=graphs)})
        self._backend = load_backend(replace(opened, manifest=self._manifest), CPU, ThreadOptions())
        self._context: ExecutionContext | None = None
        self._last_layers = ModelTail(model.eval(), self._manifest.checkpoints[-1])
        self._boundaries = set(boundaries)
        self._logit_bytes = logit_bytes
        self._check_logits(model)

    @torch.inference_mode()
    def run(self, tokens: NDArray[np.int32], lengths: NDArray[np.int32], batch: BatchWriter) -> None:
        final = self._final_states(tokens, batch)
        if self._manifest.model.num_layers in self._boundaries:
            batch.write_hidden(self._manifest.model.num_layers, final)
        positions = max(1, self._logit_bytes // (4 * len(tokens) * self._manifest.model.vocab_size))
        for start in range(0, tokens.shape[1], positions):
            batch.write_logits(start, self._logits(final[:, start : start + positions]))

    def _final_states(self, tokens: NDArray[np.int32], batch: BatchWriter | None) -> Tensor:
        """States [B, T, H] after the last layer; those of captured boundaries before it are written to ``batch``.

        Windows are padded to T on the right, where no valid token attends to.
        """
        rows, length = tokens.shape
        context = self._rows(rows)
        original = self._manifest.long_rotary_from
        context.position_offsets[:rows] = [original if original is not None and length > original else 0] * rows
        step = context.step(0, [length] * rows)
        step.input_ids[: tokens.size] = tokens.reshape(-1)
        step.place([0] * rows)
        for number, boundary in enumerate(self._manifest.checkpoints):
            step.run(self._manifest.segments[number].name)
            if batch is not None and boundary in self._boundaries:
                batch.write_hidden(boundary, _as_windows(step.hidden[number], tokens))
        for row in range(rows):
            context.forget_row(row)
        return self._last_layers.final_states(_as_windows(step.hidden[len(self._manifest.checkpoints) - 1], tokens))

    def _logits(self, states: Tensor) -> Tensor:
        """Logits [B, n, V] of final states [B, n, H]; the memory is reused by the next call."""
        count = states.shape[0] * states.shape[1]
        step = self._rows(1).step(0, [count])
        step.hidden[-1][:count] = states.reshape(count, -1).numpy()
        step.run(HEAD)
        return torch.from_numpy(step.logits[:count]).reshape(*states.shape[:2], -1)

    def _rows(self, count: int) -> ExecutionContext:
        if self._context is None or self._context.capacity < count:
            self._context = self._backend.context(count)
        return self._context

    @torch.inference_mode()
    def _check_logits(self, model: PreTrainedModel) -> None:
        vocab_size = self._manifest.model.vocab_size
        tokens = (np.arange(2 * _CHECKED_TOKENS, dtype=np.int32).reshape(2, -1) * 31) % vocab_size
        expected = model(input_ids=torch.from_numpy(tokens).long(), use_cache=False).logits.float()
        difference = float((self._logits(self._final_states(tokens, None)) - expected).abs().max())
        allowed = _TOLERANCE * max(1.0, float(expected.abs().max()))
        if not difference <= allowed:
            raise UnsupportedModelError(f"its compiled logits differ by {difference:.3g} from PyTorch's (allowed {allowed:.3g})")


def _as_windows(packed: NDArray[np.generic], tokens: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(packed[: tokens.size]).reshape(*tokens.shape, -1)
