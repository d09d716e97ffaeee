"""Set the attention attributes that the ONNX parser silently drops, and check that they are set.

The parser of TensorRT-RTX 1.7 ignores ``nonpad_kv_seqlen`` and reads ``is_causal`` as a mask from the upper left: over a cache of
Smax slots a decode step would see only slot 0. The graphs need a mask from the lower right of the valid slots:

    causal_kind       = LOWER_RIGHT              unless the attention has a mask input (a sliding window)
    key_value_lengths = write_index + S          int32 [B]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tide_runtime.errors import TargetError


def attentions(trt: Any, network: Any) -> list[Any]:
    """Every IAttention of ``network``, in order."""
    return [layer.attention for layer in layers_of(network, trt.LayerType.ATTENTION_INPUT, trt.IAttentionInputLayer)]


def cache_updates(trt: Any, network: Any) -> dict[str, str]:
    """Cache output → the cache input whose memory it shares, for every KV update of ``network``."""
    layers = layers_of(network, trt.LayerType.KV_CACHE_UPDATE, trt.IKVCacheUpdateLayer)
    return {layer.get_output(0).name: layer.get_input(0).name for layer in layers}


def layers_of(network: Any, kind: Any, interface: Any) -> list[Any]:
    """The layers of type ``kind`` as ``interface``: the bindings return base-class ILayers, whose ``__class__`` may be set."""
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    found = [layer for layer in layers if layer.type == kind]
    for layer in found:
        layer.__class__ = interface
    return found


def repair_attentions(trt: Any, network: Any) -> None:
    """Set the causal mask from the lower right and the number of valid slots on every attention."""
    found = attentions(trt, network)
    if not found:
        return
    lengths = _valid_lengths(trt, network)
    for attention in found:
        if attention.mask is None:
            attention.causal_kind = trt.CausalMaskKind.LOWER_RIGHT
        attention.key_value_lengths = lengths


def check_attentions(trt: Any, network: Any, expected: int) -> None:
    """Raise TargetError unless there are ``expected`` attentions, each causal over its sequence's valid slots."""
    found = attentions(trt, network)
    if len(found) != expected:
        raise TargetError(f"{network.name}: the parser made {len(found)} attentions of {expected}; the graph cannot be built")
    for number, attention in enumerate(found):
        masked = attention.mask is not None
        if attention.causal_kind != (trt.CausalMaskKind.NONE if masked else trt.CausalMaskKind.LOWER_RIGHT):
            raise TargetError(f"{network.name}: attention {number} has the causal mask {attention.causal_kind.name}")
        if attention.key_value_lengths is None:
            raise TargetError(f"{network.name}: attention {number} does not know how many cache slots are valid")


def check_cache_updates(network: Any, updates: dict[str, str], expected: int) -> None:
    """Raise TargetError unless ``expected`` caches are network inputs, updated in place by network outputs."""
    inputs = {network.get_input(i).name for i in range(network.num_inputs)}
    outputs = {network.get_output(i).name for i in range(network.num_outputs)}
    if len(updates) != expected or not (set(updates) <= outputs and set(updates.values()) <= inputs):
        raise TargetError(f"{network.name}: expected {expected} caches updated in place, the parser made {updates or 'none'}")


def _valid_lengths(trt: Any, network: Any) -> Any:
    """write_index + S, int32 [B]."""
    inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
    states = inputs.get("hidden", inputs.get("input_ids"))
    second = network.add_constant((1,), trt.Weights(np.array([1], np.int64))).get_output(0)
    count = network.add_gather(network.add_shape(states).get_output(0), second, 0).get_output(0)
    total = network.add_elementwise(inputs["write_index"], count, trt.ElementWiseOperation.SUM).get_output(0)
    lengths = network.add_cast(total, trt.int32).get_output(0)
    lengths.name = "kv_lengths"
    return lengths
