"""The predecessor's router (tide-inference 0.2.1), rebuilt for comparison: trained on raw states, evaluated on normed ones.

Its labels compare a state before the final norm with one after it: cos(h_c, norm(h_L)) > 0.98.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tide_calibrate.capture.batches import read_batch
from tide_calibrate.capture.store import Capture
from tide_calibrate.routers.train import COSINE_THRESHOLD
from torch import Tensor, nn
from torch.nn import functional as F

_EPOCHS, _TOKENS_PER_STEP, _LEARNING_RATE, _WIDTH = 6, 512, 1e-3, 128


class PredecessorRouter:
    """sigmoid(MLP(h)), trained on h and evaluated on norm(h), with the model's own final norm."""

    kind = "predecessor"

    def __init__(self, mlp: nn.Module, norm: nn.Module) -> None:
        self.mlp, self.norm = mlp, norm

    def scores(self, states: Tensor, logits: Tensor, total: Tensor) -> Tensor:
        return self.mlp(self.norm(states)).squeeze(-1).sigmoid()


def train_predecessor(capture: Capture, checkpoint: int, windows: NDArray[np.int64], norm: nn.Module) -> PredecessorRouter:
    """Binary cross-entropy on the states after ``checkpoint`` layers in ``windows``; ``norm`` is the model's final norm."""
    batch = read_batch(capture, windows, (checkpoint, capture.num_layers))
    states = batch.states[checkpoint][batch.valid]
    with torch.no_grad():
        final = norm(batch.states[capture.num_layers][batch.valid])
    label = (F.cosine_similarity(states, final, dim=-1) > COSINE_THRESHOLD).float()
    generator = torch.Generator().manual_seed(0)
    mlp = nn.Sequential(nn.Linear(states.shape[-1], _WIDTH), nn.SiLU(), nn.Linear(_WIDTH, 1))
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=states.shape[-1] ** -0.5, generator=generator)
    optimizer = torch.optim.Adam(mlp.parameters(), lr=_LEARNING_RATE)
    for _ in range(_EPOCHS):
        for rows in torch.randperm(len(states), generator=generator).split(_TOKENS_PER_STEP):
            loss = F.binary_cross_entropy_with_logits(mlp(states[rows]).squeeze(-1), label[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return PredecessorRouter(mlp, norm)
