"""Training-time replica of the runtime's KV cache: keys and values of tokens that have run all layers."""

from __future__ import annotations

import torch
from tide_runtime.errors import UnsupportedModelError
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tide_calibrate.model.tail import ModelTail


class _Filled(Exception):
    """Aborts a forward pass once the last layer's keys and values are written; nothing after them is needed."""


class _TrueCache(DynamicCache):
    """Cache that aborts the forward pass that fills it as soon as ``last_layer`` has written its keys and values."""

    def __init__(self, last_layer: int) -> None:
        super().__init__()
        self.last_layer, self.filling = last_layer, True

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.filling and layer_idx == self.last_layer:
            raise _Filled
        return result


@torch.no_grad()
def true_cache(tail: ModelTail, states: Tensor) -> DynamicCache:
    """Keys and values of the tail's layers for the true states [B, T, H] at the tail's first boundary.

    Raises UnsupportedModelError when the model's last layer does not cache what it attends to.
    """
    cache = _TrueCache(tail.num_layers - 1)
    try:
        tail.fill(cache, states)
    except _Filled:
        cache.filling = False
        return cache
    raise UnsupportedModelError(
        f"{type(tail.model).__name__}'s last layer keeps no keys and values of its own, so a tail head cannot be trained for it; "
        "use the heads identity and linear"
    )


def draft_mask(tokens: int, dtype: torch.dtype) -> Tensor:
    """Additive attention mask [1, 1, T, 2T]: query p sees the true keys at positions < p and its own draft's key."""
    true = torch.ones((tokens, tokens), dtype=torch.bool).tril(-1)
    allowed = torch.cat([true, torch.eye(tokens, dtype=torch.bool)], dim=1)
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[None, None]
