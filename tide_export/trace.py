"""Trace an unmodified HuggingFace causal LM once, to one ONNX graph with explicit cut points.

Two marker operators of the domain ``tide`` appear in the traced graph; lowering passes replace both.

``tide::Attention(query, key, value, key_cache, value_cache, write_index)``
    Writes ``key``/``value`` [B, Nkv, S, D] into the caches [B, Nkv, Smax, D] at ``write_index`` [B], then attends causally:
    token s of row b sees the slots ``<= write_index[b] + s``, at most ``window`` of them when ``window`` > 0.
    Outputs: attention [B, S, N, D], key_cache, value_cache. Attributes: scale, softcap (0 = off), window (0 = off).
``tide::Boundary(hidden)``
    Identity on the residual stream [B, S, H] *before* layer ``index`` (``index`` = L: after the last layer, before the
    final norm). The cut is made there.

The model's own code runs during tracing: the attention function is registered through transformers' AttentionInterface,
the cache is a ``transformers.Cache`` and boundaries are forward hooks, so no architecture needs an adapter.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from tide_runtime.errors import UnsupportedModelError
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

DOMAIN = "tide"
OPSET = 24
ATTENTION_NAME = "tide"


@dataclass(frozen=True)
class KVShape:
    """Shape of one layer's cache: ``heads`` KV heads of ``key_dim`` and ``value_dim``."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class TracedModel:
    """One traced graph: inputs input_ids, position_ids, write_index, caches; outputs logits [B, S, V] and the caches."""

    model: ir.Model
    kv_shapes: tuple[KVShape, ...]

    @property
    def num_layers(self) -> int:
        return len(self.kv_shapes)


class _TracedCacheLayer(CacheLayerMixin):
    """Hands the new keys and values through to the attention function, which writes them into the cache itself."""

    is_sliding = False
    is_compileable = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, write_index: torch.Tensor) -> None:
        self.keys, self.values, self.write_index = keys, values, write_index
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device
        self.new: tuple[torch.Tensor, torch.Tensor] | None = None
        self.attended = False

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


# The cache layer whose update() ran last and whose attention has not run yet: a model always calls them in turn.
_PENDING: list[_TracedCacheLayer] = []


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The attention function transformers calls in place of its own: query [B, N, S, D] → [B, S, N, D]."""
    for name in ("s_aux", "position_bias", "alibi"):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"attention with `{name}` is not supported: the compiled attention has no such input")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError("bidirectional attention is not supported: TIDE compiles causal decoders")
    layer = _PENDING.pop()
    batch, heads, seq, _ = query.shape
    output, layer.keys, layer.values = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::Attention",
        (query, key, value, layer.keys, layer.values, layer.write_index),
        attrs={
            "scale": float(scaling if scaling is not None else query.shape[-1] ** -0.5),
            "softcap": float(softcap or 0.0),
            "window": int(sliding_window or 0),
        },
        dtypes=(query.dtype, layer.keys.dtype, layer.values.dtype),
        shapes=((batch, seq, heads, value.shape[-1]), layer.keys.shape, layer.values.shape),
        version=1,
    )
    layer.attended = True
    return output, None


def _scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: object,
    scale: float | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Stands in for torch's function in models that do not go through AttentionInterface (Falcon, StableLM).

    Such models may repeat their KV heads before the call; the compiled attention takes them as they were cached.
    """
    assert _PENDING[-1].new is not None
    return _attention(nn.Module(), query, *_PENDING[-1].new, scaling=scale)[0].transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, _attention)


class _Step(nn.Module):
    """The traced callable: one forward of the model over explicit caches."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, position_ids, input_ids, write_index, key_caches, value_caches):
        layers = [_TracedCacheLayer(k, v, write_index) for k, v in zip(key_caches, value_caches, strict=True)]
        _PENDING.clear()
        output = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=Cache(layers=layers),
            use_cache=True,
            return_dict=True,
        )
        if not all(layer.attended for layer in layers):
            raise UnsupportedModelError(
                "some layers never attended over their cache (shared KV, linear attention or state-space layers): "
                "TIDE compiles decoders whose every layer is softmax attention with its own KV cache"
            )
        return output.logits, [layer.keys for layer in layers], [layer.values for layer in layers]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder blocks: the one ModuleList as long as ``num_hidden_layers``."""
    count = model.config.get_text_config().num_hidden_layers
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    found = [m for m in found if not any(m is not o and m in o.modules() for o in found)]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__}: expected one list of {count} decoder layers, found {len(found)}; "
            "TIDE compiles decoders that are one stack of layers"
        )
    return found[0]


def _mark(hidden: torch.Tensor, index: int) -> torch.Tensor:
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::Boundary", (hidden,), attrs={"index": index}, dtype=hidden.dtype, shape=hidden.shape, version=1
    )


@contextlib.contextmanager
def _boundaries(layers: nn.ModuleList) -> Iterator[None]:
    """Forward hooks that mark the residual stream before each layer and after the last one."""

    def before(index: int) -> Callable[..., Any]:
        def hook(_module, args, kwargs):
            if args:
                return (_mark(args[0], index), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": _mark(kwargs["hidden_states"], index)}

        return hook

    def after(_module, _args, output):
        if isinstance(output, tuple):
            return (_mark(output[0], len(layers)), *output[1:])
        return _mark(output, len(layers))

    hooks = [layer.register_forward_pre_hook(before(i), with_kwargs=True) for i, layer in enumerate(layers)]
    hooks.append(layers[-1].register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _tide_attention(model: PreTrainedModel) -> Iterator[None]:
    """Routes the model's attention to ``tide::Attention`` while tracing."""
    before = model.config._attn_implementation
    experts = getattr(model.config, "_experts_implementation", None)
    own_dispatch = not getattr(model, "_supports_attention_backend", False)
    sdpa = nn.functional.scaled_dot_product_attention
    if experts is not None:  # the eager loop over experts is data-dependent; this one gathers the chosen experts' weights
        model.set_experts_implementation("batched_mm")
    if own_dispatch:
        model.set_attn_implementation("sdpa")
        nn.functional.scaled_dot_product_attention = _scaled_dot_product_attention
    else:
        model.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = sdpa
        model.set_attn_implementation(before)
        if experts is not None:
            model.set_experts_implementation(experts)


def probe_kv_shapes(model: PreTrainedModel) -> tuple[KVShape, ...]:
    """Each layer's cache shape, seen in a two-token forward of the model itself."""
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.zeros((1, 2), dtype=torch.long), past_key_values=cache, use_cache=True)
    shapes = []
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers without a key/value cache (state-space or linear attention): "
                "TIDE compiles decoders whose every layer is softmax attention"
            )
        shapes.append(KVShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
    return tuple(shapes)


def trace(model: PreTrainedModel) -> TracedModel:
    """Trace ``model`` (eval mode, final dtype) to opset-24 ONNX with dynamic batch, sequence and cache length."""
    kv_shapes = probe_kv_shapes(model)
    layers = decoder_layers(model)
    batch, seq, slots = 2, 5, 16
    keys = [torch.zeros(batch, s.heads, slots, s.key_dim, dtype=model.dtype) for s in kv_shapes]
    values = [torch.zeros(batch, s.heads, slots, s.value_dim, dtype=model.dtype) for s in kv_shapes]
    ids = torch.arange(batch * seq).reshape(batch, seq) % model.config.get_text_config().vocab_size
    positions = torch.arange(seq).expand(batch, seq).contiguous()
    args = (positions, ids, torch.zeros(batch, dtype=torch.long), keys, values)
    dim = torch.export.Dim
    b, s, t = dim("batch", min=1, max=4096), dim("seq", min=1, max=1 << 20), dim("slots", min=1, max=1 << 20)
    dynamic = ({0: b, 1: s}, {0: b, 1: s}, {0: b}, [{0: b, 2: t}] * len(keys), [{0: b, 2: t}] * len(values))
    with torch.no_grad(), _tide_attention(model), _boundaries(layers), _quiet():
        program = torch.onnx.export(
            _Step(model), args, dynamo=True, opset_version=OPSET, dynamic_shapes=dynamic, optimize=False, verbose=False
        )
    assert program is not None
    return TracedModel(program.model, kv_shapes)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs a line per missing optional package; errors still surface as exceptions."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
