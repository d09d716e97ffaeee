"""Divide the windows of the train split between heads and routers.

An exit head agrees more often on the text it was trained on, so a router trained on the same text would be overconfident.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tide_runtime.errors import DataError

from tide_calibrate.capture.store import Capture

_SHARES = {"head": 0.55, "head_held_out": 0.1, "router": 0.25, "router_held_out": 0.1}
_MIN_DOCUMENTS = 12  # with fewer, whole documents cannot approximate the shares, so single windows are assigned


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
