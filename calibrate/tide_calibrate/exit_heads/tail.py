"""Exit head that translates the state to the input of the model's last k layers and runs those, skipping the layers between.

At run time a draft's tail attends over the keys and values of the *true* states at all earlier positions, because every accepted
token has run all layers by then; only the draft's own key and value come from its translated state. Training reproduces this:
in a window of T tokens, query p of the tail sees the true keys at positions < p and the translated key at p, [T, 2T] scores.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tide_runtime.errors import ParamsError, UnsupportedModelError
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tide_calibrate.exit_heads.base import ExitHead
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.model.tail import ModelTail
from tide_export.graphs.exit_modules import Translator


class TailHead(ExitHead):
    """Translator, then the frozen model's last ``layers`` layers, final norm and LM head."""

    def __init__(self, model: FrozenModel, checkpoint: int, layers: int, translator: Translator) -> None:
        self.start = model.num_layers - layers
        if checkpoint > self.start:
            raise ParamsError(
                f"head tail:{layers} at checkpoint {checkpoint} of {model.num_layers} layers would run layers twice; "
                f"it needs a checkpoint of at most {self.start}"
            )
        super().__init__(f"tail:{layers}", checkpoint, (checkpoint, self.start), translator)
        self.tail = model.tail(layers)
        self.window = model.sliding_window

    def logits(self, states: Mapping[int, Tensor], vocabulary: Tensor | None = None) -> Tensor:
        drafts = self.translated(states)
        self._check_window_length(drafts.shape[1])
        cache = true_cache(self.tail, states[self.start])
        mask = draft_mask(drafts.shape[1], self.tail.model.dtype, drafts.device)
        return self.tail(drafts, mask=mask, cache=cache, vocabulary=vocabulary)

    def _check_window_length(self, tokens: int) -> None:
        if self.window is not None and tokens > self.window:
            raise ParamsError(
                f"windows of {tokens} tokens are longer than the model's sliding attention window of {self.window}; "
                f"head {self.kind} needs a capture with windows of at most {self.window} tokens"
            )


class _Filled(Exception):
    """Aborts a forward pass once the last layer's keys and values are written; nothing after them is needed."""


class _TrueCache(DynamicCache):
    """Cache that aborts the forward pass that fills it as soon as ``last_layer`` has written its keys and values."""

    def __init__(self, last_layer: int) -> None:
        super().__init__()
        self.last_layer = last_layer
        self.filling = True

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


def draft_mask(tokens: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Additive attention mask [1, 1, T, 2T]: query p sees the true keys at positions < p and its own draft's key."""
    true = torch.ones((tokens, tokens), dtype=torch.bool, device=device).tril(-1)
    allowed = torch.cat([true, torch.eye(tokens, dtype=torch.bool, device=device)], dim=1)
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill(~allowed, torch.finfo(dtype).min)[None, None]
