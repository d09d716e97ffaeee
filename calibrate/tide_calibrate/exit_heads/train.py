"""Distil the full model's output distribution into an exit head, on captured states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import CalibrationError
from torch import Tensor

from tide_calibrate.capture.batches import WindowBatch, divide_train_windows, in_batches, read_batch
from tide_calibrate.capture.store import Capture
from tide_calibrate.config import require_positive
from tide_calibrate.exit_heads import ExitHead
from tide_calibrate.exit_heads.sampled_vocabulary import SampledVocabulary, VocabularySample, narrowed
from tide_calibrate.parallel import wait_for

_MIN_MASS = 1e-6
Head = TypeVar("Head", bound=ExitHead)


@dataclass(frozen=True)
class HeadTraining:
    """Hyperparameters of an exit head's training. The budget is in steps, not seconds, so that training is reproducible.

    Args:
        steps: maximum number of optimizer steps.
        windows_per_step: windows of text per step.
        learning_rate: peak learning rate of Adam; linear warm-up over the first tenth of the steps, then cosine decay to 0.
        held_out_windows: maximum number of windows used for evaluation.
        check_every: steps between evaluations.
        patience: evaluations without an improvement after which training stops.
        seed: seed of the order of the windows.
    """

    steps: int = 120
    windows_per_step: int = 2
    learning_rate: float = 3e-3
    held_out_windows: int = 8
    check_every: int = 30
    patience: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "steps", "windows_per_step", "held_out_windows", "check_every", "patience", "learning_rate")


@dataclass(frozen=True)
class HeadProgress:
    """Mean divergence (nats per token) and agreement (0 … 1) on the held-out windows after ``step`` steps."""

    step: int
    divergence: float
    agreement: float


def train_head(
    head: Head,
    capture: Capture,
    training: HeadTraining | None = None,
    on_step: Callable[[], None] = lambda: None,
    vocabulary: SampledVocabulary | None = None,
) -> tuple[Head, list[HeadProgress]]:
    """Minimise KL(full || early) over the train windows; the head ends with its best held-out weights.

    Args:
        on_step: called after every optimizer step; an exception from it ends the training.
        vocabulary: train and evaluate on the logits of these tokens; None: of all.

    Returns:
        ``head``, trained in place, and the evaluations on the held-out windows, the first one before training. A head without
        trainable weights is returned unchanged.

    Raises:
        CalibrationError: the loss is NaN or infinite, or the capture lacks a boundary that the head reads.
        DataError: too little text.
    """
    training = training or HeadTraining()
    windows = divide_train_windows(capture, training.seed)
    held_out = windows.head_held_out[: training.held_out_windows]
    trainer = _Trainer(head, capture, training, windows.head, held_out, vocabulary)
    history = [trainer.evaluate(0)]
    if head.trained():
        trainer.run(history, on_step)
    return head, history


def step_seconds(head: ExitHead, capture: Capture, training: HeadTraining, vocabulary: SampledVocabulary | None) -> float:
    """Seconds of a training step in this thread, the faster of two after a first one; ``head`` is trained by them."""
    trainer = _Trainer(
        head, capture, training, divide_train_windows(capture, training.seed).head, np.empty(0, np.int64), vocabulary
    )
    return trainer.step_seconds()


class _Trainer:
    def __init__(
        self,
        head: ExitHead,
        capture: Capture,
        training: HeadTraining,
        windows: NDArray[np.int64],
        held_out: NDArray[np.int64],
        vocabulary: SampledVocabulary | None,
    ) -> None:
        self.head = head
        self.capture = capture
        self.training = training
        self.vocabulary = vocabulary
        self.windows, self.held_out = windows, held_out
        self.divergence = getattr(head.translator, "loss", top_k_divergence)  # a package's head may have its own

    def run(self, history: list[HeadProgress], on_step: Callable[[], None]) -> None:
        best = history[0].divergence
        misses = 0
        best_weights = [parameter.detach().clone() for parameter in self.head.trained()]
        optimizer = torch.optim.Adam(self.head.trained(), lr=self.training.learning_rate, betas=(0.9, 0.98))
        for step, batch in enumerate(_shuffled_batches(self.windows, self.training), start=1):
            self._step(step, batch, optimizer)
            on_step()
            if step % self.training.check_every and step < self.training.steps:
                continue
            history.append(self.evaluate(step))
            if history[-1].divergence < best:
                best = history[-1].divergence
                misses = 0
                best_weights = [parameter.detach().clone() for parameter in self.head.trained()]
            else:
                misses += 1
            if step >= self.training.steps or misses >= self.training.patience:
                break
        for parameter, value in zip(self.head.trained(), best_weights, strict=True):
            parameter.data.copy_(value)

    def step_seconds(self) -> float:
        optimizer = torch.optim.Adam(self.head.trained(), lr=self.training.learning_rate)
        times = []
        for step, batch in zip(range(1, 4), _shuffled_batches(self.windows, self.training), strict=False):
            start = perf_counter()
            self._step(step, batch, optimizer)
            wait_for(self.head.device)
            times.append(perf_counter() - start)
        return min(times[1:])

    def _step(self, step: int, windows: NDArray[np.int64], optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.training.learning_rate * _learning_rate_factor(step, self.training.steps)
        batch, sample = narrowed(read_batch(self.capture, windows, self.head.boundaries, self.head.device), self.vocabulary)
        loss = self._loss(self._logits(batch, sample), batch, sample).mean()
        if not torch.isfinite(loss):
            raise CalibrationError(
                f"training head {self.head.kind} at checkpoint {self.head.checkpoint} gave a loss of {loss.item()} "
                f"in step {step}; the captured states or logits hold NaN or infinite values, capture again with --dtype fp32"
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.trained(), 1.0)
        optimizer.step()

    def _logits(self, batch: WindowBatch, sample: VocabularySample | None) -> Tensor:
        return self.head.logits(batch.states, None if sample is None else sample.ids)[batch.valid]

    def _loss(self, logits: Tensor, batch: WindowBatch, sample: VocabularySample | None) -> Tensor:
        valid = batch.valid
        total = None if sample is None else sample.logsumexp(logits)
        return self.divergence(logits, batch.top_ids[valid], batch.top_logits[valid], batch.logsumexp[valid], total)

    @torch.no_grad()
    def evaluate(self, step: int) -> HeadProgress:
        divergences, agrees = [], []
        for part in in_batches(self.held_out, self.training.windows_per_step):
            batch, sample = narrowed(read_batch(self.capture, part, self.head.boundaries, self.head.device), self.vocabulary)
            logits = self._logits(batch, sample)
            divergences.append(self._loss(logits, batch, sample))
            agrees.append(logits.argmax(1) == batch.top_ids[batch.valid][:, 0])
        return HeadProgress(step, float(torch.cat(divergences).mean()), float(torch.cat(agrees).float().mean()))


def _shuffled_batches(windows: NDArray[np.int64], training: HeadTraining) -> Iterator[NDArray[np.int64]]:
    """Yield batches of windows without end, reshuffled every epoch."""
    generator = np.random.default_rng(training.seed)
    while True:
        yield from in_batches(generator.permutation(windows), training.windows_per_step)


def _learning_rate_factor(step: int, steps: int) -> float:
    warm_up = max(1, steps // 10)
    if step <= warm_up:
        return step / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up + 1)))


def top_k_divergence(
    logits: Tensor, top_ids: Tensor, top_logits: Tensor, logsumexp: Tensor, early_logsumexp: Tensor | None = None
) -> Tensor:
    """KL(full || early) in nats over K + 1 outcomes: the K captured tokens, and "any other token".

    Merging outcomes never increases a KL divergence (data processing inequality), so this is a lower bound of the KL over the
    vocabulary; it is 0 when the distributions are equal.

    Args:
        logits: [n, V] of the exit.
        top_ids, top_logits: [n, K] of the full model.
        logsumexp: [n], over all V logits of the full model.
        early_logsumexp: [n], of the exit's; None: over ``logits``.

    Returns:
        [n].
    """
    full = top_logits - logsumexp[:, None]
    early = logits.gather(1, top_ids) - (logits.logsumexp(1) if early_logsumexp is None else early_logsumexp)[:, None]
    top_k = (full.exp() * (full - early)).sum(1)
    full_rest = _remaining_mass(full)
    early_rest = _remaining_mass(early)
    return top_k + full_rest * (full_rest.log() - early_rest.log())


def _remaining_mass(log_probabilities: Tensor) -> Tensor:
    return (1 - log_probabilities.exp().sum(1)).clamp(min=_MIN_MASS)
