"""Batches of captured windows as tensors, the input of exit heads and routers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import CalibrationError
from torch import Tensor

from tide_calibrate.capture.store import Capture, states


@dataclass(frozen=True)
class WindowBatch:
    """A batch of B windows, T tokens long as the longest of them.

    Args:
        states: boundary → [B, T, H] float32.
        valid: [B, T] bool, False on padding.
        top_ids, top_logits: [B, T, K] int64 and float32, the full model's largest logits, largest first.
        logsumexp: [B, T] float32, over all logits of the vocabulary.
    """

    states: dict[int, Tensor]
    valid: Tensor
    top_ids: Tensor
    top_logits: Tensor
    logsumexp: Tensor

    def at_valid(self, values: Tensor) -> Tensor:
        """The values [n, …] of valid tokens among ``values`` [B, T, …], without a copy where all are."""
        return values.flatten(0, 1) if self.valid.all() else values[self.valid]


def read_batch(capture: Capture, windows: Sequence[int] | NDArray[np.int64], boundaries: Iterable[int]) -> WindowBatch:
    """Read the windows with indices ``windows``, with states at ``boundaries`` only.

    Raises CalibrationError when the capture holds no states at one of the boundaries.
    """
    index = np.asarray(windows)
    lengths = capture.lengths[index].astype(np.int64)
    longest = int(lengths.max())
    return WindowBatch(
        states={boundary: _states(capture, boundary, index, longest) for boundary in boundaries},
        valid=torch.from_numpy(np.arange(longest)[None] < lengths[:, None]),
        top_ids=torch.from_numpy(capture.top_ids[index, :longest].astype(np.int64)),
        top_logits=torch.from_numpy(capture.top_logits[index, :longest]),
        logsumexp=torch.from_numpy(capture.logsumexp[index, :longest]),
    )


def in_batches(windows: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Split ``windows`` into consecutive batches of ``size``; the last batch may be smaller."""
    return [windows[start : start + size] for start in range(0, len(windows), size)]


def _states(capture: Capture, boundary: int, index: NDArray[np.int64], longest: int) -> Tensor:
    if boundary not in capture.hidden:
        raise CalibrationError(
            f"the capture holds no states after {boundary} layers, only after {', '.join(map(str, sorted(capture.hidden)))}; "
            f"capture again with {boundary} among the candidate layers"
        )
    return states(capture, boundary, index)[:, :longest]
