"""Scales of int8 KV caches: one for each channel of a layer's keys and values, taken from a short run of the model.

    cached = clamp(round(x / scale), -128, 127),  scale = MARGIN · max |x| / 127

The maximum is over random token ids, the same in every export, so no text is needed. Their keys and values reach about as far as
those of text, and `MARGIN` covers the rest: a wider range would cost more in rounding than it saves in clipping. The sequences
start at positions that spread over the whole cache, because rotary embeddings turn a channel's range into its partner's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.bundle.manifest import LayerInfo
from tide_runtime.errors import UnsupportedModelError
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionAndFullAttentionLayer

MARGIN = 1.5
_SEQUENCES, _TOKENS = 8, 128
_MIN_RANGE = (
    0.01  # smallest range of a channel, relative to the layer's largest: one that was zero in the run may be small in use
)


@dataclass(frozen=True)
class KVScales:
    """One layer's scales, float32: ``key`` [heads, key_dim], ``value`` [heads, value_dim]."""

    key: NDArray[np.float32]
    value: NDArray[np.float32]


def kv_scales(model: PreTrainedModel, layers: Sequence[LayerInfo], max_seq_len: int) -> dict[int, KVScales]:
    """Layer number → scales of the cache of ``max_seq_len`` slots that it reads; of layers that read one.

    Raises UnsupportedModelError if the model keeps no keys and values, or caches something else than it attends to, as multi-head
    latent attention does.
    """
    if not any(layer.kv for layer in layers):
        raise UnsupportedModelError(
            f"--kv int8 is not supported for {type(model).__name__}, which keeps no keys and values; leave it out"
        )
    cache = Cache(layers=[LinearAttentionAndFullAttentionLayer() for _ in layers])
    tokens = min(_TOKENS, max_seq_len)
    random = np.random.default_rng(0)
    ids = random.integers(0, model.config.get_text_config().vocab_size, (_SEQUENCES, tokens))
    starts = np.linspace(0, max_seq_len - tokens, _SEQUENCES).astype(np.int64)
    with torch.no_grad():
        model(
            input_ids=torch.from_numpy(ids),
            position_ids=torch.from_numpy(starts[:, None] + np.arange(tokens)),
            past_key_values=cache,
            use_cache=True,
        )
    own = {
        number: KVScales(_scales(kept.keys, kv.heads, kv.key_dim), _scales(kept.values, kv.heads, kv.value_dim))
        for number, (layer, kept) in enumerate(zip(layers, cache.layers, strict=True))
        if (kv := layer.kv) is not None
    }
    return own | {number: own[layer.kv_source] for number, layer in enumerate(layers) if layer.kv_source is not None}


def _scales(cached: torch.Tensor | None, heads: int, width: int) -> NDArray[np.float32]:
    """Scales [heads, width] of ``cached`` [B, heads, T, at most width]; channels that pad it are zero."""
    if cached is None or cached.dim() != 4 or cached.shape[1] != heads or cached.shape[3] > width:
        found = None if cached is None else list(cached.shape)
        raise UnsupportedModelError(
            f"--kv int8 is not supported for this model: its cache holds {found}, and attention reads {heads} heads of {width}, "
            "whose range cannot be measured there; leave out --kv int8"
        )
    largest = np.zeros((heads, width), np.float32)
    largest[:, : cached.shape[3]] = cached.float().abs().amax((0, 2)).numpy()
    return np.maximum(largest, _MIN_RANGE * largest.max()) * np.float32(MARGIN / 127)


class _RoundedLayer(LinearAttentionAndFullAttentionLayer):
    """A layer's cache whose keys and values are rounded as int8 caches hold them; its states, if it has any, are not."""

    def __init__(self, scales: KVScales | None) -> None:
        super().__init__()
        self._scales = scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._scales is not None
        return super().update(_round(key_states, self._scales.key), _round(value_states, self._scales.value), *args, **kwargs)


def _round(states: torch.Tensor, scales: NDArray[np.float32]) -> torch.Tensor:
    by_channel = torch.from_numpy(scales)[:, None, : states.shape[-1]]
    return ((states.float() / by_channel).round().clamp(-128, 127) * by_channel).to(states.dtype)


def rounded_cache(scales: Mapping[int, KVScales], num_layers: int) -> Cache:
    """A cache for the eager model that rounds like the bundle's int8 caches."""
    return Cache(layers=[_RoundedLayer(scales.get(number)) for number in range(num_layers)])
