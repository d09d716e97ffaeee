"""Train a drafter for minutes on a model's own replies, as EAGLE-3 heads are trained: on the states that they go on from.

A guess behind the first reads the drafter's own state, so the loss of the 2nd and 3rd one is part of each step (training-time
test, arXiv:2503.01840, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tide_export.drafters.base import Drafter
from tide_export.drafters.guesses import chain
from tide_export.drafters.replies import Replies, reply_to
from tide_export.load import LoadedModel

REPLY_TOKENS = 112
_LOSS_WEIGHTS = (1.0, 0.7, 0.5)
_LEARNING_RATE = 2e-3
_TEXTS = 4  # of a step
_GROUP = 96  # replies that are written together


@dataclass(frozen=True)
class TrainingText:
    """Replies in groups, with the states at the drafter's taps."""

    groups: list[Replies]

    @property
    def tokens(self) -> int:
        return sum(group.ids.numel() for group in self.groups)


def write_text(loaded: LoadedModel, prompts: Tensor, taps: Iterable[int], seed: int) -> TrainingText:
    """Replies of the model to ``prompts`` [B, S]."""
    boundaries = sorted(set(taps))
    groups = prompts.split(_GROUP)
    return TrainingText([reply_to(group, loaded, boundaries, REPLY_TOKENS, seed + n) for n, group in enumerate(groups)])


def train(drafter: Drafter, text: TrainingText, steps: int, seed: int) -> float:
    """Train all parameters of the drafter that ask for gradients; returns the mean loss of the last tenth of the steps."""
    random = torch.Generator().manual_seed(seed)
    place = torch.full((int(drafter.vocabulary.max()) + 1,), -1)
    place[drafter.vocabulary] = torch.arange(len(drafter.vocabulary))
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    losses = []
    for step in range(steps):
        group = text.groups[int(torch.randint(len(text.groups), (), generator=random))]
        rows = torch.randperm(len(group.ids), generator=random)[:_TEXTS]
        loss = _loss(drafter, group, rows, place)
        rate = min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for one in optimizer.param_groups:
            one["lr"] = _LEARNING_RATE * rate
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-(steps // 10) :]) / (steps // 10)


def _loss(drafter: Drafter, group: Replies, rows: Tensor, place: Tensor) -> Tensor:
    """Cross entropy with the model's likeliest tokens, of those that the drafter knows."""
    tapped = torch.cat([group.states[tap][rows] for tap in drafter.taps], -1).clone()
    likeliest, loss = group.likeliest[rows].clone(), torch.zeros(())
    ids = group.ids[rows].clone()  # tensors of inference mode take no part in training
    for ahead, (logits, _) in enumerate(chain(drafter, tapped, ids, len(_LOSS_WEIGHTS))):
        wanted = likeliest[:, 1 + ahead : 1 + ahead + logits.shape[1]]
        known = torch.where(wanted < len(place), place[wanted.clamp(max=len(place) - 1)], -1)
        own = F.cross_entropy(logits.flatten(0, 1).float(), known.flatten(), ignore_index=-1)
        loss = loss + _LOSS_WEIGHTS[ahead] * own
    return loss
