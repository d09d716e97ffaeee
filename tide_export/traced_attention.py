"""Replace a model's attention and KV cache by the marker ``tide::Attention`` while its code runs.

The attention function is registered through transformers' AttentionInterface and the cache is a ``transformers.Cache``, so no
architecture needs an adapter. In eager mode the marker returns zeros of the right shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tide_runtime.errors import UnsupportedModelError
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

DOMAIN = "tide"
_ATTENTION_NAME = "tide"


@dataclass(frozen=True)
class KVShape:
    """Shape of one layer's cache: ``heads`` KV heads of ``key_dim`` and ``value_dim``.

    ``source``: the earlier layer whose keys and values they are; None where the layer has its own.
    """

    heads: int
    key_dim: int
    value_dim: int
    source: int | None = None


class TracedCacheLayer(CacheLayerMixin):
    """Passes new keys and values to the attention function, which writes them into the cache.

    ``shape``: shape of the cached keys and values; set by the attention function.
    """

    is_sliding = False
    is_compileable = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, write_index: torch.Tensor) -> None:
        self.keys, self.values, self.write_index = keys, values, write_index
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device
        self.new: tuple[torch.Tensor, torch.Tensor] | None = None
        self.shape: KVShape | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.new = key_states, value_states
        _PENDING.append(self)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


# The cache layer whose update() ran last and whose attention has not run yet: models alternate the two calls.
_PENDING: list[TracedCacheLayer] = []
_LAYERS: list[TracedCacheLayer] = []  # of the pass that runs


def _attending(module: nn.Module, key: torch.Tensor) -> tuple[TracedCacheLayer, int | None]:
    """The cache layer of the attention ``module``, and the layer whose ``key`` it reads if that is not its own.

    A layer that shares keys attends to the tensors that an earlier layer's update() returned. It gets caches of its own names,
    into which it writes the same rows: the runtime binds them to the earlier layer's memory.
    """
    if _PENDING:
        return _PENDING.pop(), None
    source = next((i for i, layer in enumerate(_LAYERS) if layer.new is not None and layer.new[0] is key), None)
    number = getattr(module, "layer_idx", None)
    if source is None or number is None:
        raise UnsupportedModelError("attention over keys that no layer's cache was given is not supported")
    return _LAYERS[number], source


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls instead of its own: query [B, N, S, D] → [B, S, N, Dv].

    Models with multi-head latent attention expand latents before this call, so the cache holds expanded keys and values.
    Kernels require keys and values of one width: the narrower tensor is padded with zeros, which change no score or output.
    """
    for name in ("position_bias", "alibi"):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"attention with `{name}` is not supported: the compiled attention has no such input")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError("bidirectional attention is not supported: TIDE compiles causal decoders")
    layer, source = _attending(module, key)
    scale, value_dim = float(scaling if scaling is not None else query.shape[-1] ** -0.5), value.shape[-1]
    width = max(query.shape[-1], value_dim)
    query, key, value = (_padded_to(tensor, width) for tensor in (query, key, value))
    layer.shape = KVShape(key.shape[1], width, width, source)
    sinks = () if s_aux is None else (s_aux.to(query.dtype),)
    batch, heads, seq, _ = query.shape
    output, layer.keys, layer.values = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::Attention",
        (query, key, value, layer.keys, layer.values, layer.write_index, *sinks),
        attrs={"scale": scale, "softcap": float(softcap or 0.0), "window": int(sliding_window or 0)},
        dtypes=(query.dtype, layer.keys.dtype, layer.values.dtype),
        shapes=((batch, seq, heads, width), layer.keys.shape, layer.values.shape),
        version=1,
    )
    return output if width == value_dim else output[..., :value_dim], None


def _padded_to(tensor: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - tensor.shape[-1]
    return nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: object,
    scale: float | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Replacement of torch's function for models that do not use AttentionInterface (Falcon, StableLM).

    Such models may repeat their KV heads before the call; the compiled attention reads the cached heads instead.
    """
    assert _PENDING[-1].new is not None
    return _attention(nn.Module(), query, *_PENDING[-1].new, scaling=scale)[0].transpose(1, 2)


AttentionInterface.register(_ATTENTION_NAME, _attention)


@contextlib.contextmanager
def tide_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model's attention is ``tide::Attention``."""
    before = model.config._attn_implementation
    experts = getattr(model.config, "_experts_implementation", None)
    own_dispatch = not getattr(model, "_supports_attention_backend", False)
    sdpa = nn.functional.scaled_dot_product_attention
    if experts is not None:  # the eager loop over experts is data-dependent; this one gathers the selected experts' weights
        model.set_experts_implementation("batched_mm")
    if own_dispatch:
        model.set_attn_implementation("sdpa")
        nn.functional.scaled_dot_product_attention = _scaled_dot_product_attention
    else:
        model.set_attn_implementation(_ATTENTION_NAME)
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = sdpa
        model.set_attn_implementation(before)
        if experts is not None:
            model.set_experts_implementation(experts)


def run_layers(
    model: PreTrainedModel, layers: Sequence[TracedCacheLayer], input_ids: torch.Tensor, position_ids: torch.Tensor
) -> torch.Tensor:
    """Logits of one forward pass inside `tide_attention`.

    Raises UnsupportedModelError unless every layer attended over its cache.
    """
    _PENDING.clear()
    _LAYERS[:] = layers
    output = model(
        input_ids=input_ids,
        position_ids=position_ids,
        past_key_values=Cache(layers=list(layers)),
        use_cache=True,
        return_dict=True,
    )
    _LAYERS.clear()
    if _PENDING:
        attention = sorted({type(m).__name__ for m in model.modules() if type(m).__name__.endswith("Attention")})
        raise UnsupportedModelError(
            f"{type(model).__name__} is not supported, because its attention ({', '.join(attention) or 'of unknown class'}) "
            "calls neither transformers' AttentionInterface nor torch's scaled_dot_product_attention, where TIDE puts its own; "
            "an implementation of the model that calls either can be exported"
        )
    if not all(layer.shape for layer in layers):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not supported, because some layers never attended over their cache (shared KV, linear "
            "attention or state-space layers): TIDE compiles decoders whose every layer is softmax attention with a KV cache"
        )
    return output.logits
