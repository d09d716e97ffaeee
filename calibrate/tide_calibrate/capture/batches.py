"""Captured windows for training: batches as tensors, and the division of the train split between heads and routers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import CalibrationError, DataError
from torch import Tensor

from tide_calibrate.capture.store import Capture, states

_SHARES = {"head": 0.55, "head_held_out": 0.1, "router": 0.25, "router_held_out": 0.1}
_MIN_DOCUMENTS = 12  # with fewer, whole documents cannot approximate the shares, and single windows are assigned


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


def read_batch(
    capture: Capture, windows: Sequence[int] | NDArray[np.int64], boundaries: Iterable[int], device: torch.device | str = "cpu"
) -> WindowBatch:
    """Read the windows with indices ``windows``, with states at ``boundaries`` only, onto ``device``.

    Raises CalibrationError when the capture holds no states at one of the boundaries.
    """
    index = np.asarray(windows)
    lengths = capture.lengths[index].astype(np.int64)
    longest = int(lengths.max())
    return WindowBatch(
        states={boundary: _states(capture, boundary, index, longest).to(device) for boundary in boundaries},
        valid=torch.from_numpy(np.arange(longest)[None] < lengths[:, None]).to(device),
        top_ids=torch.from_numpy(capture.top_ids[index, :longest].astype(np.int64)).to(device),
        top_logits=torch.from_numpy(capture.top_logits[index, :longest]).to(device),
        logsumexp=torch.from_numpy(capture.logsumexp[index, :longest]).to(device),
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


@dataclass(frozen=True)
class TrainWindows:
    """Disjoint window indices of the train split, each in random order.

    The held-out windows serve early stopping of heads, and Platt scaling of routers.
    """

    head: NDArray[np.int64]
    head_held_out: NDArray[np.int64]
    router: NDArray[np.int64]
    router_held_out: NDArray[np.int64]


def divide_train_windows(capture: Capture, seed: int = 0) -> TrainWindows:
    """Assign the train split's windows by document, or by window when there are too few documents.

    An exit head agrees more often on the text it was trained on, so a router trained on the same text would be overconfident.

    Raises DataError when there are fewer than four windows.
    """
    windows = np.flatnonzero((capture.split == 0) & (capture.lengths > 0))
    if len(windows) < len(_SHARES):
        raise DataError(f"the train split has {len(windows)} windows of text, at least {len(_SHARES)} are needed; give more data")
    groups: NDArray[np.integer] = capture.document[windows]
    if len(np.unique(groups)) < _MIN_DOCUMENTS:
        groups = windows
    part_of_group = _assign_groups(groups, seed)
    order = np.random.default_rng(seed).permutation(windows)
    part = dict(zip(windows.tolist(), part_of_group.tolist(), strict=True))
    return TrainWindows(*(np.array([w for w in order.tolist() if part[w] == i], np.int64) for i in range(len(_SHARES))))


def _assign_groups(groups: NDArray[np.integer], seed: int) -> NDArray[np.int64]:
    """The part of each window: groups are assigned, largest first, to the part that is furthest below its share."""
    names, inverse, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    shuffled = np.random.default_rng(seed).permutation(len(names))
    target = np.array(list(_SHARES.values())) * len(groups)
    filled = np.zeros(len(target))
    part = np.zeros(len(names), np.int64)
    for group in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        part[group] = np.argmax((target - filled) / target)
        filled[part[group]] += sizes[group]
    return part[inverse]
