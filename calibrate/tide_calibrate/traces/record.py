"""Run exit heads and routers over one split of a capture, a few windows at a time, and note what each said of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import DataError
from torch import Tensor

from tide_calibrate.capture.batches import WindowBatch, in_batches, read_batch
from tide_calibrate.capture.store import Capture
from tide_calibrate.exit_heads import ExitHead
from tide_calibrate.model.lm_head import LMHead
from tide_calibrate.routers import Router
from tide_calibrate.text.documents import SplitName
from tide_calibrate.traces.trace import ExitTrace, SplitTrace

Exit = tuple[int, str]  # checkpoint, head
_SPLITS: tuple[SplitName, ...] = ("train", "threshold", "test")
_WINDOWS_PER_READ = 4


def trace_split(
    capture: Capture,
    split: SplitName,
    lm_head: LMHead,
    heads: Mapping[Exit, ExitHead],
    routers: Mapping[Exit, Sequence[Router]],
    max_windows: int | None = None,
) -> SplitTrace:
    """Every head and router on every token of ``split``.

    Args:
        lm_head: of the model itself, for the likelihood of tokens that were not among its K likeliest.
        heads: what is traced, by checkpoint and kind.
        routers: the routers of each of ``heads``; those that are not named get none.
        max_windows: trace only this many windows, spread evenly over the split.

    Raises:
        DataError: the split is empty.
        CalibrationError: the capture lacks a boundary that a head reads.
    """
    windows = windows_of(capture, split, max_windows)
    boundaries = sorted({boundary for head in heads.values() for boundary in head.boundaries} | {capture.num_layers})
    lengths = capture.lengths[windows]
    tokens, done = int(lengths.sum()), 0
    full_nll = np.empty(tokens, np.float32)
    rows = {exit: _ExitRows(tokens, routers.get(exit, ())) for exit in heads}
    for part in in_batches(windows, _WINDOWS_PER_READ):
        batch = read_batch(capture, part, boundaries)
        following = _following(capture, part, batch)
        here = slice(done, done := done + len(following))
        full_nll[here] = _full_nll(batch, following, lm_head, capture.num_layers)
        for exit, head in heads.items():
            rows[exit].put(here, batch, following, head)
    return SplitTrace(
        window=np.repeat(windows, lengths).astype(np.int32),
        document=np.repeat(capture.document[windows], lengths).astype(np.int32),
        full_nll=full_nll,
        exits={exit: rows[exit].trace(*exit) for exit in heads},
        num_layers=capture.num_layers,
    )


def windows_of(capture: Capture, split: SplitName, max_windows: int | None = None) -> NDArray[np.int64]:
    """Window numbers of a split in order, ``max_windows`` spread evenly over it. Raises DataError when there are none."""
    windows = np.flatnonzero((capture.split == _SPLITS.index(split)) & (capture.lengths > 0))
    if not len(windows):
        raise DataError(f"the {split} split holds no text; give more data, in more documents")
    if max_windows is None or len(windows) <= max_windows:
        return windows
    return windows[np.linspace(0, len(windows) - 1, max_windows).astype(np.int64)]


class _ExitRows:
    """One exit's answers to ``tokens`` tokens, filled batch by batch.

    Nothing that stays is allocated on the way: small arrays between a batch's logits would keep the heap from shrinking, by the
    size of the logits of every batch.
    """

    def __init__(self, tokens: int, routers: Sequence[Router]) -> None:
        self.agrees, self.nll = np.empty(tokens, np.bool_), np.empty(tokens, np.float32)
        self.scores = {router.kind: np.empty(tokens, np.float32) for router in routers}
        self._routers = routers

    @torch.no_grad()
    def put(self, here: slice, batch: WindowBatch, following: Tensor, head: ExitHead) -> None:
        logits = head.logits(batch.states)[batch.valid]
        self.agrees[here] = (logits.argmax(-1) == batch.top_ids[batch.valid][:, 0]).numpy()
        self.nll[here] = _nll(logits, logits.logsumexp(-1), following)
        for router in self._routers:
            self.scores[router.kind][here] = router.scores(batch.states[head.checkpoint][batch.valid], logits).numpy()

    def trace(self, checkpoint: int, kind: str) -> ExitTrace:
        return ExitTrace(checkpoint, kind, self.agrees, self.nll, self.scores)


def _following(capture: Capture, windows: NDArray[np.int64], batch: WindowBatch) -> Tensor:
    """[n] int64: the token after each valid token, -1 at a window's end."""
    longest = batch.valid.shape[1]
    tokens = torch.from_numpy(capture.tokens[windows, :longest].astype(np.int64))
    following = torch.full_like(tokens, -1)
    following[:, :-1] = torch.where(batch.valid[:, 1:], tokens[:, 1:], -1)
    return following[batch.valid]


def _nll(logits: Tensor, logsumexp: Tensor, following: Tensor) -> NDArray[np.float32]:
    chosen = logits.gather(-1, following.clamp(min=0)[:, None])[:, 0]
    return torch.where(following < 0, torch.nan, logsumexp - chosen).numpy()


@torch.no_grad()
def _full_nll(batch: WindowBatch, following: Tensor, lm_head: LMHead, num_layers: int) -> NDArray[np.float32]:
    """From the kept logits; the few tokens that are not among them take the LM head on the captured final state."""
    valid = batch.valid
    kept = batch.top_ids[valid] == following[:, None]
    chosen = torch.where(kept, batch.top_logits[valid], 0.0).sum(-1)
    rare = ~kept.any(-1) & (following >= 0)
    logits = lm_head(batch.states[num_layers][valid][rare])
    chosen[rare] = logits.gather(-1, following[rare][:, None])[:, 0]
    return torch.where(following < 0, torch.nan, batch.logsumexp[valid] - chosen).numpy()
