"""Replace a model's attention and caches by the marker ``tide::Attention`` while its code runs.

The attention function is registered through transformers' AttentionInterface and the cache is a ``transformers.Cache``, so no
architecture needs an adapter. In eager mode the marker returns zeros of the right shapes. `traced_recurrence` does the same for
layers that keep states.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import cycle
from typing import Any

import torch
from tide_runtime.bundle.manifest import KVInfo, LayerInfo, StateInfo
from tide_runtime.errors import UnsupportedModelError
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionAndFullAttentionLayer
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

from tide_export.model.attention_masks import declared_window

DOMAIN = "tide"
ATTENTION_NAME = _EXPERTS_NAME = "tide"
KEY_VALUES = ("key_cache", "value_cache")
_POSITIONS = ("position_ids", "cache_position")  # arguments from which masks are built
_KEEPS_NOTHING = ("mlp", "moe")  # types of layers that compute each token by itself


class TracedLayer(LinearAttentionAndFullAttentionLayer):
    """What one layer keeps of a text, while its code runs: new keys, values and rows go to the functions that replace the
    model's, which read ``caches`` and write ``caches_out``.

    It never has a previous state, so that the model's code takes its branch for many tokens.

    Args:
        caches: the layer's caches by the names of `trace.kept_names`, without its number; empty while they are found out.
        kv: shape of the cached keys and values, and ``states``: of the states; set when the layer uses them.
        kv_source: the earlier layer whose keys and values it reads in place of its own.
        convolves: it was asked for a convolution state, and no convolution has read it yet.
        window: tokens that its attention sees, 0: all; None: it has not called it.
        masked: its attention was given a mask; ``masked_by_hand``: as an argument of torch's function.
    """

    is_sliding = False
    is_compileable = True

    def __init__(self, caches: Mapping[str, torch.Tensor], write_index: torch.Tensor) -> None:
        super().__init__()
        self.caches, self.write_index = caches, write_index
        self.caches_out: dict[str, torch.Tensor] = {}
        self.is_initialized = True
        self.new: tuple[torch.Tensor, torch.Tensor] | None = None
        self.kv: KVInfo | None = None
        self.kv_source: int | None = None
        self.states: list[StateInfo] = []
        self.convolves = False
        self.window: int | None = None
        self.masked = self.masked_by_hand = False

    @property
    def info(self) -> LayerInfo:
        return LayerInfo(self.kv, self.states, self.kv_source)

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.new is not None:
            raise UnsupportedModelError(
                "a cache that is written twice in one pass is not supported: TIDE keeps one for each loop"
            )
        self.new = key_states, value_states
        _PENDING.append(self)
        return key_states, value_states

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> torch.Tensor:
        self.convolves = True
        RECURRENT[:] = [self]
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object) -> torch.Tensor:
        if not self.states or self.states[-1].kind != "recurrence":
            raise UnsupportedModelError(
                "a recurrence that calls none of transformers' shared functions, where TIDE puts its own, is not supported"
            )
        if [*recurrent_states.shape[1:]] != self.states[-1].shape:
            raise UnsupportedModelError("a layer that joins the states of several recurrences is not supported")
        self.caches_out[f"state_{len(self.states) - 1}"] = recurrent_states
        return recurrent_states

    def state(self, info: StateInfo, batch: int) -> tuple[str, torch.Tensor]:
        """Name and value of the layer's next state, [B, *shape] in fp32."""
        name = f"state_{len(self.states)}"
        self.states.append(info)
        return name, self.caches[name] if self.caches else torch.zeros(batch, *info.shape)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


# The cache layer whose update() ran last and whose attention has not run yet: models alternate the two calls.
_PENDING: list[TracedLayer] = []
_RUNNING: list[list[TracedLayer]] = []  # the layers of the pass that runs
# The layer that asked for a convolution state last: its convolution and recurrence follow.
RECURRENT: list[TracedLayer] = []


def _attending(module: nn.Module, key: torch.Tensor) -> tuple[TracedLayer, int | None]:
    """The layer of the attention ``module``, and the earlier one whose ``key`` it reads if that is not its own.

    A layer that shares keys attends to the tensors that an earlier layer's update() returned. It gets caches of its own names,
    into which it writes the same rows: the runtime binds them to the earlier layer's memory.
    """
    if _PENDING:
        return _PENDING.pop(), None
    layers = _RUNNING[0]
    source = next((i for i, layer in enumerate(layers) if layer.new is not None and layer.new[0] is key), None)
    number = getattr(module, "layer_idx", None)
    if source is None or number is None or source == number:
        raise UnsupportedModelError("attention over keys that no layer's cache was given is not supported")
    return layers[number], source


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
    for name, given in kwargs.items():
        if isinstance(given, torch.Tensor) and name not in _POSITIONS:
            raise UnsupportedModelError(f"attention with `{name}` is not supported: the compiled attention has no such input")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise UnsupportedModelError("bidirectional attention is not supported: TIDE compiles causal decoders")
    layer, source = _attending(module, key)
    layer.window = sliding_window or declared_window(module) or 0
    layer.masked = attention_mask is not None
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    value_dim = value.shape[-1]
    width = max(query.shape[-1], value_dim)
    query, key, value = (_padded_to(tensor, width) for tensor in (query, key, value))
    layer.kv_source = source
    layer.kv = KVInfo(key.shape[1], width, width) if source is None else None
    caches = [layer.caches.get(name, key) for name in KEY_VALUES]
    sinks = () if s_aux is None else (s_aux.to(query.dtype),)
    batch, heads, seq, _ = query.shape
    output, *caches_out = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::Attention",
        (query, key, value, *caches, layer.write_index, *sinks),
        attrs={"scale": scale, "softcap": float(softcap or 0.0), "window": int(layer.window)},
        dtypes=(query.dtype, *(cache.dtype for cache in caches)),
        shapes=((batch, seq, heads, width), *(cache.shape for cache in caches)),
        version=1,
    )
    layer.caches_out.update(zip(KEY_VALUES, caches_out, strict=True))
    return output if width == value_dim else output[..., :value_dim], None


def _padded_to(tensor: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - tensor.shape[-1]
    return nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: object,
    scale: float | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Replacement of torch's function for models that do not use AttentionInterface (Falcon, StableLM).

    Such models may repeat their KV heads before the call; the compiled attention reads the cached heads instead.
    """
    layer = _PENDING[-1]
    assert layer.new is not None
    made = _attention(nn.Module(), query, *layer.new, scaling=scale)[0].transpose(1, 2)
    layer.masked_by_hand = attn_mask is not None
    return made


def _experts(module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """What transformers calls for a mixture of experts: the sum [T, H] of each token's k experts.

    Each pair of token and expert is a row of products with the gathered matrices. A token's rows are added one after the other:
    ONNX Runtime sums a single token's in another order than those of several.
    """
    if module.is_transposed or module.has_bias or not module.has_gate or module.has_post_expert_norm:
        return batched_mm_experts_forward(module, hidden, top_k_index, top_k_weights)
    count = top_k_index.shape[-1]
    ids = top_k_index.reshape(-1)
    rows = hidden.repeat_interleave(count, 0).unsqueeze(-1)
    gated = module._apply_gate(torch.bmm(module.gate_up_proj.index_select(0, ids), rows).squeeze(-1))
    outputs = torch.bmm(module.down_proj.index_select(0, ids), gated.unsqueeze(-1)).squeeze(-1)
    weighted = (outputs * top_k_weights.reshape(-1, 1)).view(-1, count, hidden.shape[-1])
    total = weighted[:, 0]
    for number in range(1, count):
        total = total + weighted[:, number]
    return total.to(hidden.dtype)


AttentionInterface.register(ATTENTION_NAME, _attention)
ExpertsInterface.register(_EXPERTS_NAME, _experts)


@contextlib.contextmanager
def tide_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model's attention is ``tide::Attention``."""
    before = model.config._attn_implementation
    experts = getattr(model.config, "_experts_implementation", None)
    own_dispatch = not (model._supports_attention_backend or _calls_interface(model))
    sdpa = nn.functional.scaled_dot_product_attention
    if experts is not None:  # the eager loop over experts is data-dependent; this one gathers the selected experts' weights
        model.set_experts_implementation(_EXPERTS_NAME)
    if own_dispatch:
        if model._supports_sdpa:  # not a model without attention
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


@contextlib.contextmanager
def tide_layer(config: PreTrainedConfig) -> Iterator[None]:
    """Context in which one layer outside a model, whose attention and experts follow ``config``, runs over a `TracedLayer`."""
    before = config._attn_implementation
    experts = getattr(config, "_experts_implementation", None)
    _PENDING.clear()
    config._attn_implementation = ATTENTION_NAME
    if experts is not None:
        config._experts_implementation = _EXPERTS_NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        if experts is not None:
            config._experts_implementation = experts


def _calls_interface(model: PreTrainedModel) -> bool:
    """Whether the model's code looks up its attention function, which some models do without saying so."""
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    return any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files)


def run_layers(
    model: PreTrainedModel, layers: list[TracedLayer], input_ids: torch.Tensor, position_ids: torch.Tensor
) -> torch.Tensor:
    """Logits of one forward pass inside `tide_layers`. Where the model's code uses more ``layers``, they are added.

    Raises UnsupportedModelError unless every layer used its caches, or has none by its config.
    """
    _PENDING.clear()
    RECURRENT.clear()
    _RUNNING[:] = [layers]
    parameters = inspect.signature(model.forward).parameters
    cache = "cache_params" if "cache_params" in parameters else "past_key_values"  # models without attention
    positions = {"position_ids": position_ids} if "past_key_values" in parameters else {}
    kept = Cache(layers=layers)
    kept.layer_class_to_replicate = partial(TracedLayer, {}, layers[0].write_index)  # for the layers of later loops
    output = model(input_ids=input_ids, use_cache=True, return_dict=True, **positions, **{cache: kept})
    _RUNNING.clear()
    if _PENDING:
        attention = sorted({type(m).__name__ for m in model.modules() if type(m).__name__.endswith("Attention")})
        raise UnsupportedModelError(
            f"{type(model).__name__} is not supported, because its attention ({', '.join(attention) or 'of unknown class'}) "
            "calls neither transformers' AttentionInterface nor torch's scaled_dot_product_attention, where TIDE puts its own; "
            "an implementation of the model that calls either can be exported"
        )
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    idle = [
        kind
        for layer, kind in zip(layers, cycle(types[: config.num_hidden_layers]), strict=False)  # the same in every loop
        if not (layer.info.attends or layer.states or kind in _KEEPS_NOTHING)
    ]
    if idle or any(layer.convolves for layer in layers):
        kinds = ", ".join(sorted(set(idle)))
        raise UnsupportedModelError(
            f"{type(model).__name__} is not supported, because some layers{f' ({kinds})' if kinds else ''} never used their "
            "cache: they compute a recurrence or convolution by functions of their own, which TIDE does not know"
        )
    return output.logits
