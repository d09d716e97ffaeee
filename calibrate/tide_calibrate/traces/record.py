"""Run exit heads and routers over one split of a capture, a few windows at a time, and record their outputs per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import DataError
from torch import Tensor

from tide_calibrate.capture.batches import WindowBatch, in_batches, read_batch
from tide_calibrate.capture.reference import ReferenceTokens
from tide_calibrate.capture.store import Capture
from tide_calibrate.exit_heads import ExitHead
from tide_calibrate.exit_heads.sampled_vocabulary import SampledVocabulary, VocabularySample, narrowed
from tide_calibrate.model.frozen import LMHead
from tide_calibrate.routers import Router
from tide_calibrate.text.documents import SPLITS, SplitName
from tide_calibrate.traces.trace import Exit, ExitTrace, SplitTrace

WINDOWS_PER_READ = 4


def trace_split(
    capture: Capture,
    split: SplitName | NDArray[np.int64],
    lm_head: LMHead,
    heads: Mapping[Exit, ExitHead],
    routers: Mapping[Exit, Sequence[Router]],
    max_windows: int | None = None,
    reference: ReferenceTokens | None = None,
    vocabulary: SampledVocabulary | None = None,
) -> SplitTrace:
    """Evaluate every head and router on every token of ``split``, or of the windows with these indices.

    Args:
        lm_head: the model's own, for the likelihood of tokens that are not among the K captured logits.
        heads: the heads to trace, by checkpoint and kind.
        routers: routers of each head; a head that is missing here has none.
        max_windows: trace only this many windows, spread evenly over the split.
        reference: count agreement with these tokens, for exits and for the full model; None: with the full model's likeliest.
        vocabulary: exits choose among a sample of it, so that they agree a little more often, and likelihoods and probabilities
            are estimates; None: among all tokens.

    Raises:
        DataError: the split is empty.
        CalibrationError: the capture lacks a boundary that a head reads.
    """
    windows = windows_of(capture, split, max_windows) if isinstance(split, str) else split
    boundaries = sorted({boundary for head in heads.values() for boundary in head.boundaries} | {capture.num_layers})
    lengths = capture.lengths[windows]
    tokens = int(lengths.sum())
    done = 0
    full_nll = np.empty(tokens, np.float32)
    full_agrees = np.empty(tokens, np.bool_)
    recorders = {key: _ExitRecorder(tokens, routers.get(key, ())) for key in heads}
    for part in in_batches(windows, WINDOWS_PER_READ):
        batch = read_batch(capture, part, boundaries, lm_head.device)
        next_tokens = _next_tokens(capture, part, batch)
        span = slice(done, done := done + len(next_tokens))
        full_nll[span] = _full_nll(batch, next_tokens, lm_head, capture.num_layers)
        full_tokens = batch.top_ids[..., 0][batch.valid]
        wanted = full_tokens if reference is None else reference.read(part, batch.valid)
        full_agrees[span] = (full_tokens == wanted).cpu().numpy()
        batch, sample = narrowed(batch, vocabulary, next_tokens[next_tokens >= 0], wanted, max_choices=1)
        if sample is not None:
            next_tokens = torch.where(next_tokens < 0, -1, sample.places(next_tokens))
            wanted = sample.places(wanted)
        for key, head in heads.items():
            recorders[key].record(span, batch, sample, next_tokens, wanted, head)
    return SplitTrace(
        window=np.repeat(windows, lengths).astype(np.int32),
        document=np.repeat(capture.document[windows], lengths).astype(np.int32),
        full_nll=full_nll,
        exits={key: recorders[key].trace(*key) for key in heads},
        num_layers=capture.num_layers,
        full_agrees=None if reference is None else full_agrees,
    )


def windows_of(capture: Capture, split: SplitName, max_windows: int | None = None) -> NDArray[np.int64]:
    """Ascending window indices of a split, at most ``max_windows``, evenly spread. Raises DataError when there are none."""
    windows = np.flatnonzero((capture.split == SPLITS.index(split)) & (capture.lengths > 0))
    if not len(windows):
        raise DataError(f"the {split} split holds no text; give more data, in more documents")
    if max_windows is None or len(windows) <= max_windows:
        return windows
    return windows[np.linspace(0, len(windows) - 1, max_windows).astype(np.int64)]


class _ExitRecorder:
    """Outputs of one exit on ``tokens`` tokens, filled batch by batch.

    All arrays are allocated up front: small arrays allocated between the logits of batches would fragment the heap, so that it
    could not shrink and would grow by the size of every batch's logits.
    """

    def __init__(self, tokens: int, routers: Sequence[Router]) -> None:
        self.agrees, self.nll = np.empty(tokens, np.bool_), np.empty(tokens, np.float32)
        self.scores = {router.kind: np.empty(tokens, np.float32) for router in routers}
        self._routers = routers

    @torch.no_grad()
    def record(
        self,
        span: slice,
        batch: WindowBatch,
        sample: VocabularySample | None,
        next_tokens: Tensor,
        wanted: Tensor,
        head: ExitHead,
    ) -> None:
        logits = batch.at_valid(head.logits(batch.states, None if sample is None else sample.ids))
        total = logits.logsumexp(-1) if sample is None else sample.logsumexp(logits)
        self.agrees[span] = (logits.argmax(-1) == wanted).cpu().numpy()
        self.nll[span] = _nll(logits, total, next_tokens)
        for router in self._routers:
            scores = router.scores(batch.states[head.checkpoint][batch.valid], logits, total)
            self.scores[router.kind][span] = scores.cpu().numpy()

    def trace(self, checkpoint: int, kind: str) -> ExitTrace:
        return ExitTrace(checkpoint, kind, self.agrees, self.nll, self.scores)


def _next_tokens(capture: Capture, windows: NDArray[np.int64], batch: WindowBatch) -> Tensor:
    """The token after each valid token, [n] int64; -1 at a window's end."""
    longest = batch.valid.shape[1]
    tokens = torch.from_numpy(capture.tokens[windows, :longest].astype(np.int64)).to(batch.valid.device)
    next_tokens = torch.full_like(tokens, -1)
    next_tokens[:, :-1] = torch.where(batch.valid[:, 1:], tokens[:, 1:], -1)
    return next_tokens[batch.valid]


def _nll(logits: Tensor, logsumexp: Tensor, next_tokens: Tensor) -> NDArray[np.float32]:
    logit = logits.gather(-1, next_tokens.clamp(min=0)[:, None])[:, 0]
    return torch.where(next_tokens < 0, torch.nan, logsumexp - logit).cpu().numpy()


@torch.no_grad()
def _full_nll(batch: WindowBatch, next_tokens: Tensor, lm_head: LMHead, num_layers: int) -> NDArray[np.float32]:
    """Negative log-likelihoods [n] of the full model; tokens outside the captured top K need the LM head on the final state."""
    valid = batch.valid
    kept = batch.top_ids[valid] == next_tokens[:, None]
    logit = torch.where(kept, batch.top_logits[valid], 0.0).sum(-1)
    rare = ~kept.any(-1) & (next_tokens >= 0)
    if rare.any():
        ids, place = next_tokens[rare].unique(return_inverse=True)
        if not lm_head.samples_vocabulary:
            ids = None
            place = next_tokens[rare]
        logit[rare] = lm_head(batch.states[num_layers][valid][rare], ids).gather(-1, place[:, None])[:, 0]
    return torch.where(next_tokens < 0, torch.nan, batch.logsumexp[valid] - logit).cpu().numpy()
