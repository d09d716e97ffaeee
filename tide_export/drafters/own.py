"""The draft head that tide_calibrate.draft_head trains, as a drafter: it has no attention and reads the last token alone.

    x      = fuse · [embedding; rmsnorm(middle); rmsnorm(final)],   [middle; final] = before
    y      = x + down · (silu(gate · n) * (up · n)),   n = rmsnorm(x)
    logits = rows · rmsnorm(y);   state = [y; y]

Norms have no weights: training folds them into the matrices.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tide_export.drafters.base import Drafter
from tide_export.graphs.exit_modules import RMS_EPSILON


class OwnHead(Drafter):
    """The draft head of a calibration; it computes in float32, whatever the model's dtype.

    Args:
        tensors: fuse [H, 3H], gate_up [2I, H], down [H, I] and rows [N, H] float32, vocabulary [N] int64.
        taps: the layers run before the state in the middle, and the number of all layers.
    """

    def __init__(self, tensors: Mapping[str, NDArray[np.generic]], taps: tuple[int, int]) -> None:
        hidden = tensors["fuse"].shape[0]
        super().__init__("own", taps, 2 * hidden, torch.from_numpy(tensors["vocabulary"]), PreTrainedConfig(), None)
        for name in ("fuse", "gate_up", "down", "rows"):
            self.add_module(f"{name}_matrix", _matrix(tensors[name]))
        self.norm = LlamaRMSNorm(hidden, RMS_EPSILON)
        self.eval()

    def fuse(self, tapped: Tensor) -> Tensor:
        return tapped

    def forward(
        self,
        embedded: Tensor,
        before: Tensor,
        position_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        middle, final = before.float().chunk(2, -1)
        x = self.fuse_matrix(torch.cat([embedded.float(), self.norm(middle), self.norm(final)], -1))
        gate, up = self.gate_up_matrix(self.norm(x)).chunk(2, -1)
        own = x + self.down_matrix(F.silu(gate) * up)
        return self.rows_matrix(self.norm(own)), torch.cat([own, own], -1).to(before.dtype)


def _matrix(values: NDArray[np.generic]) -> nn.Linear:
    rows, columns = values.shape
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(torch.from_numpy(np.ascontiguousarray(values)).float(), requires_grad=False)
    return linear
