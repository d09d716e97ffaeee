"""`GroupQueryAttention` (com.microsoft) for any numbers of tokens of several sequences, padded to [B, S].

    q, k, v  = the product of the packed projections, or three products; q and k rotated by the tables of the node
    caches   : k and v written in place, from slot seqlens_k + 1 - S of each sequence on
    output   = softmax(scale · q · keysᵀ + mask) · values, a token sees its own slot and those before it

Lengths are read on the device, so that a captured graph runs at every length; the mask covers all slots that the caches are bound
to. Caches in int8 have a scale for each channel of a KV head, and hold x / scale, rounded. The G query heads that share a KV head
are rows of one head, [B, KV, S·G, D]: keys and values are never repeated. What the layers of a graph share, masks and rows of
tables, is computed once per run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROTARY_TABLES = 7, 8  # operands cos and sin
SINKS = 11
CACHE_SCALES = 12, 13  # operands of keys and values in int8


@dataclass
class Shared:
    """Tensors of one run, by what they are made from; emptied between runs."""

    tensors: dict[Hashable, Tensor] = field(default_factory=dict)

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key not in self.tensors:
            self.tensors[key] = make()
        return self.tensors[key]


def rotation_table(cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """[2, P, 2 · half] factors of a rotated vector x and of x with its halves, or neighbours, swapped: cos and signed sin."""
    if interleaved:
        pairs = torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)
    else:
        pairs = torch.stack((cos, cos), -2), torch.stack((-sin, sin), -2)
    return torch.stack([pair.reshape(cos.shape[0], -1) for pair in pairs])


def cache_scales(keys: Tensor, values: Tensor) -> Tensor:
    """[2, 2, KV, 1, D] scales of int8 keys and of values, [1, KV, 1, D] each, with their reciprocals."""
    return torch.stack([torch.cat((scales, scales.reciprocal())) for scales in (keys, values)])


def _rounded(x: Tensor, reciprocals: Tensor) -> Tensor:
    return (x.float() * reciprocals).round_().clamp_(-128, 127).to(torch.int8)


class Attention:
    """The function of a node. ``shared``: of the graph; ``kernels``: the module `fused_kernels`, or None."""

    def __init__(self, attributes: Mapping[str, Any], shared: Shared, kernels: Any = None) -> None:
        self.heads, self.kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
        self.softcap, self.window = attributes.get("softcap", 0.0), attributes.get("local_window_size", -1)
        self._scale = attributes.get("scale", 0.0)
        self._rotates = bool(attributes.get("do_rotary", 0))
        self._interleaved = bool(attributes.get("rotary_interleaved", 0))
        self._shared = shared
        self._kernels = kernels if not self.softcap else None

    def __call__(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor,
        seqlens_k: Tensor,
        total: Tensor | None,
        table: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention [B, S, N · D] and the caches.

        Args:
            query: [B, S, N · D], or with keys and values [B, S, (N + 2 KV) · D].
            key_cache: [B, KV, slots, D], as ``value_cache``.
            seqlens_k: [B] int32, tokens of a sequence with those of the step, less one.
            total: not read.
            table: `rotation_table`.
            scales: `cache_scales`.
        """
        batch, seq, width = *query.shape[:2], key_cache.shape[-1]
        kernels = self._kernels
        caches = (key_cache, value_cache)
        if kernels is not None and key is None and sinks is None and kernels.fits(seq, width, query.dtype):
            angles = query.new_empty(2, 1, 0) if table is None else table
            scale = self._scale or width**-0.5
            made = kernels.attention(query, angles, seqlens_k, *caches, self.heads, scale, self._interleaved, self.window, scales)
            return made, *caches
        places = self._places(seqlens_k, seq, key_cache.shape[2])
        if key is None or value is None:
            every = query.view(batch, seq, self.heads + 2 * self.kv_heads, width)
            turned, new_values = every[:, :, : -self.kv_heads], every[:, :, -self.kv_heads :]
            turned = self._rotated(turned, places, table)
            queries, new_keys = turned[:, :, : self.heads], turned[:, :, self.heads :]
        else:
            queries = self._rotated(query.view(batch, seq, self.heads, width), places, table)
            new_keys = self._rotated(key.view(batch, seq, self.kv_heads, width), places, table)
            new_values = value.view(batch, seq, self.kv_heads, value_cache.shape[-1])
        by_head = new_keys.transpose(1, 2), new_values.transpose(1, 2)
        if scales is not None:
            by_head = _rounded(by_head[0], scales[0, 1]), _rounded(by_head[1], scales[1, 1])
        for cache, new in zip(caches, by_head, strict=True):
            cache.scatter_(2, places[:, None, :, None].expand_as(new), new)  # one kernel, index_put_ has several
        keys, values = caches if scales is None else ((caches[i] * scales[i, 0]).to(query.dtype) for i in range(2))
        return self._attended(queries, keys, values, places, sinks), *caches

    def _places(self, seqlens_k: Tensor, seq: int, slots: int) -> Tensor:
        """[B, S] slot of each token. Padding may lie behind the last slot: it takes the last one, which no token needs then."""

        def make() -> Tensor:
            offsets = torch.arange(1 - seq, 1, device=seqlens_k.device)
            return (seqlens_k[:, None] + offsets).clamp_(0, slots - 1)

        return self._shared.get("places", make)

    def _rotated(self, heads: Tensor, places: Tensor, table: Tensor | None) -> Tensor:
        """``heads`` [B, S, N, D], rotated by the angles of their places."""
        if not self._rotates or table is None:
            return heads
        cos, sin = self._shared.get(("angles", id(table)), lambda: table[:, places].unsqueeze(3))
        width = table.shape[-1]
        part = heads[..., :width]
        pairs = part.unflatten(-1, (-1, 2) if self._interleaved else (2, -1))
        swapped = pairs.flip(-1 if self._interleaved else -2).flatten(-2)
        turned = torch.addcmul(part * cos, swapped, sin)
        return turned if width == heads.shape[-1] else torch.cat((turned, heads[..., width:]), -1)

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, places: Tensor, sinks: Tensor | None) -> Tensor:
        """[B, S, N · D]; ``queries`` are [B, S, N, D]."""
        seq, heads, width = queries.shape[1:]
        group = heads // self.kv_heads
        scale = self._scale or width**-0.5
        stacked = queries.unflatten(2, (self.kv_heads, group)).transpose(1, 2).flatten(2, 3)
        mask = self._mask(places, keys, group)
        if self.softcap or sinks is not None:
            output = self._products(stacked, keys, values, mask, scale, sinks)
        else:
            output = F.scaled_dot_product_attention(stacked, keys, values, mask, scale=scale)
        return output.unflatten(2, (seq, group)).transpose(1, 2).flatten(2)

    def _mask(self, places: Tensor, keys: Tensor, group: int) -> Tensor:
        """[B, 1, S · G, slots]: 0 where a token sees a slot, -inf elsewhere."""
        slots = keys.shape[2]

        def make() -> Tensor:
            every = torch.arange(slots, device=places.device)
            end = places[:, :, None]
            unseen = every > end
            if self.window > 0:
                unseen |= every <= end - self.window
            mask = torch.zeros(unseen.shape, dtype=keys.dtype, device=keys.device).masked_fill_(unseen, -torch.inf)
            return mask.unsqueeze(2).expand(-1, -1, group, -1).flatten(1, 2).unsqueeze(1)

        return self._shared.get(("mask", self.window, group), make)

    def _products(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Attention with a soft-cap, or with sinks [N], whose exponentials are in the denominator."""
        scores = ((queries * scale) @ keys.mT).float()
        if self.softcap:
            scores = (scores / self.softcap).tanh_() * self.softcap
        scores = scores + mask
        if sinks is not None:
            by_head = sinks.view(1, self.kv_heads, 1, -1)
            repeats = scores.shape[2] // by_head.shape[3]
            by_row = by_head.expand(scores.shape[0], -1, repeats, -1).reshape(*scores.shape[:3], 1)
            scores = torch.cat((scores, by_row.float()), -1)
        weights = torch.softmax(scores, -1)[..., : keys.shape[2]]
        return weights.to(values.dtype) @ values
