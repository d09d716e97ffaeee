"""Train the MLP router of one exit: will the early guess be the full model's?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.errors import ParamsError
from torch import Tensor
from torch.nn import functional as F

from tide_calibrate.capture.batches import in_batches, read_batch
from tide_calibrate.capture.store import Capture
from tide_calibrate.capture.training_split import divide_train_windows
from tide_calibrate.config import require_positive
from tide_calibrate.exit_heads import ExitHead
from tide_calibrate.routers.mlp import ROUTER_WIDTH, MlpRouter
from tide_calibrate.routers.platt import fit_platt

Label = Literal["agreement", "cosine"]
COSINE_THRESHOLD = 0.98
_WINDOWS_PER_READ = 4


@dataclass(frozen=True)
class RouterTraining:
    """How routers are trained.

    Args:
        label: ``agreement``: the exit head's likeliest token is the full model's. ``cosine``: the state at the checkpoint and the
            final state are nearly parallel (cos > 0.98), as the predecessor had it.
        windows: of text to learn from, at most; the exit head is run on them once.
        held_out_windows: for calibrating the scores, at most.
        epochs: times that every token is seen.
        tokens_per_step: tokens per optimizer step.
        learning_rate: Adam's; it falls to 0 linearly.
        width: R, of the hidden layer.
        seed: of the weights and the order of tokens.
    """

    label: Label = "agreement"
    windows: int = 96
    held_out_windows: int = 32
    epochs: int = 6
    tokens_per_step: int = 512
    learning_rate: float = 3e-3
    width: int = ROUTER_WIDTH
    seed: int = 0

    def __post_init__(self) -> None:
        if self.label not in ("agreement", "cosine"):
            raise ParamsError(f"label must be agreement or cosine, got {self.label!r}")
        require_positive(self, "windows", "held_out_windows", "epochs", "tokens_per_step", "learning_rate", "width")


@dataclass(frozen=True)
class RouterExamples:
    """States [n, H] at a checkpoint and whether a token may stop there [n] bool."""

    states: Tensor
    right: Tensor


def train_router(head: ExitHead, capture: Capture, training: RouterTraining | None = None) -> MlpRouter:
    """A router for ``head`` whose scores are probabilities: trained on text the head was not, calibrated on yet other text.

    Classes weigh the same while training; Platt scaling on the held-out windows, folded into the last layer, then brings the
    scores back to the true odds.

    Raises:
        CalibrationError: the capture lacks a boundary that head or label needs.
        DataError: too little text.
    """
    training = training or RouterTraining()
    windows = divide_train_windows(capture, training.seed)
    examples = router_examples(head, capture, windows.router[: training.windows], training.label)
    router = fit_router(examples, training)
    held_out = router_examples(head, capture, windows.router_held_out[: training.held_out_windows], training.label)
    with torch.no_grad():
        router.rescale(*fit_platt(router(held_out.states).numpy(), held_out.right.numpy()))
    return router.requires_grad_(False)


@torch.no_grad()
def router_examples(head: ExitHead, capture: Capture, windows: NDArray[np.int64], label: Label = "agreement") -> RouterExamples:
    """What ``head`` gets right in ``windows``, or, for label ``cosine``, which states are nearly parallel to the final one."""
    boundaries = head.boundaries if label == "agreement" else (head.checkpoint, capture.num_layers)
    states, right = [], []
    for part in in_batches(windows, _WINDOWS_PER_READ):
        batch = read_batch(capture, part, boundaries)
        here = batch.states[head.checkpoint][batch.valid]
        if label == "agreement":
            right.append(head.logits(batch.states)[batch.valid].argmax(-1) == batch.top_ids[batch.valid][:, 0])
        else:
            right.append(F.cosine_similarity(here, batch.states[capture.num_layers][batch.valid], dim=-1) > COSINE_THRESHOLD)
        states.append(here)
    return RouterExamples(torch.cat(states), torch.cat(right))


def fit_router(examples: RouterExamples, training: RouterTraining) -> MlpRouter:
    """The router that best tells right from wrong, both weighing the same; its scores are not yet probabilities."""
    router = MlpRouter(examples.states.shape[-1], training.width, training.seed)
    target = examples.right.float()
    share = target.mean().clamp(0.01, 0.99)  # a class that hardly occurs must not rule by a handful of tokens
    weight = torch.where(examples.right, 0.5 / share, 0.5 / (1 - share))
    optimizer = torch.optim.AdamW(router.parameters(), lr=training.learning_rate, weight_decay=1e-2)
    generator = torch.Generator().manual_seed(training.seed)
    orders = [torch.randperm(len(target), generator=generator) for _ in range(training.epochs)]
    batches = [batch for order in orders for batch in order.split(training.tokens_per_step)]
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = training.learning_rate * (1 - step / len(batches))
        loss = F.binary_cross_entropy_with_logits(router(examples.states[batch]), target[batch], weight[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return router
