"""Train the MLP router of one exit to predict whether the exit's token is the full model's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.plugins import ROUTERS, extension
from torch import Tensor
from torch.nn import functional as F

from tide_calibrate.capture.batches import divide_train_windows, in_batches, read_batch
from tide_calibrate.capture.store import Capture
from tide_calibrate.config import require_positive
from tide_calibrate.exit_heads import ExitHead
from tide_calibrate.exit_heads.sampled_vocabulary import SampledVocabulary, narrowed
from tide_calibrate.routers import Router
from tide_calibrate.routers.platt import fit_platt
from tide_export.graphs.exit_modules import ROUTER_WIDTH, MlpRouter

_WINDOWS_PER_READ = 4


@dataclass(frozen=True)
class RouterTraining:
    """Hyperparameters of router training.

    Args:
        windows: maximum number of training windows; the exit head runs on them once.
        held_out_windows: maximum number of windows for Platt scaling.
        epochs: passes over the training tokens.
        tokens_per_step: tokens per optimizer step.
        learning_rate: initial learning rate of AdamW; it decays linearly to 0.
        width: R, width of the hidden layer.
        seed: seed of the weights and of the order of tokens.
    """

    windows: int = 96
    held_out_windows: int = 32
    epochs: int = 6
    tokens_per_step: int = 512
    learning_rate: float = 3e-3
    width: int = ROUTER_WIDTH
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "windows", "held_out_windows", "epochs", "tokens_per_step", "learning_rate", "width")


@dataclass(frozen=True)
class RouterExamples:
    """States [n, H] at a checkpoint and labels [n] bool: True where the exit head's argmax token is the full model's."""

    states: Tensor
    right: Tensor


def train_router(
    head: ExitHead, capture: Capture, training: RouterTraining | None = None, vocabulary: SampledVocabulary | None = None
) -> MlpRouter:
    """Train a router for ``head`` whose scores are calibrated probabilities.

    Head, router and Platt scaling use disjoint windows. The classes are balanced during training; Platt scaling, folded into the
    last layer, then restores the true odds. With a ``vocabulary`` the exit's token is the likeliest of that.

    Raises:
        CalibrationError: the capture lacks a boundary that the head needs.
        DataError: too little text.
    """
    training = training or RouterTraining()
    windows = divide_train_windows(capture, training.seed)
    examples = router_examples(head, capture, windows.router[: training.windows], vocabulary)
    router = fit_router(examples, training)
    held_out_windows = windows.router_held_out[: training.held_out_windows]
    held_out = router_examples(head, capture, held_out_windows, vocabulary)
    with torch.no_grad():
        router.rescale(*fit_platt(router(held_out.states).cpu().numpy(), held_out.right.cpu().numpy()))
    return router.requires_grad_(False)


def package_router(
    name: str, head: ExitHead, capture: Capture, training: RouterTraining, vocabulary: SampledVocabulary | None = None
) -> Router:
    """The router of a package; one that has a method ``fit`` learns from what the MLP router learns from."""
    router = extension(ROUTERS, name)(capture.hidden[head.checkpoint].shape[-1], seed=training.seed).to(head.device)
    router.kind = name
    if hasattr(router, "fit"):
        windows = divide_train_windows(capture, training.seed).router[: training.windows]
        examples = router_examples(head, capture, windows, vocabulary)
        router.fit(examples.states, examples.right)
    return router.requires_grad_(False)


@torch.no_grad()
def router_examples(
    head: ExitHead,
    capture: Capture,
    windows: NDArray[np.int64],
    vocabulary: SampledVocabulary | None = None,
) -> RouterExamples:
    """Compute states and labels of the valid tokens in ``windows``."""
    states, right = [], []
    for part in in_batches(windows, _WINDOWS_PER_READ):
        batch, sample = narrowed(read_batch(capture, part, head.boundaries, head.device), vocabulary, max_choices=1)
        logits = head.logits(batch.states, None if sample is None else sample.ids)[batch.valid]
        right.append(logits.argmax(-1) == batch.top_ids[batch.valid][:, 0])
        states.append(batch.states[head.checkpoint][batch.valid])
    return RouterExamples(torch.cat(states), torch.cat(right))


def fit_router(examples: RouterExamples, training: RouterTraining) -> MlpRouter:
    """Minimise the class-balanced cross-entropy; the scores are not yet calibrated."""
    router = MlpRouter(examples.states.shape[-1], training.width, training.seed).to(examples.states.device)
    target = examples.right.float()
    share = target.mean().clamp(0.01, 0.99)  # bounds the weight of a rare class
    weight = torch.where(examples.right, 0.5 / share, 0.5 / (1 - share))
    optimizer = torch.optim.AdamW(router.parameters(), lr=training.learning_rate, weight_decay=1e-2)
    generator = torch.Generator().manual_seed(training.seed)
    orders = [torch.randperm(len(target), generator=generator).to(target.device) for _ in range(training.epochs)]
    batches = [batch for order in orders for batch in order.split(training.tokens_per_step)]
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = training.learning_rate * (1 - step / len(batches))
        loss = F.binary_cross_entropy_with_logits(router(examples.states[batch]), target[batch], weight[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return router
