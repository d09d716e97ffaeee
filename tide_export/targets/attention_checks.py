"""Checks that a parsed network attends and updates its caches as its graph does: the ONNX parser may drop what it does not know.

The parser of TensorRT-RTX 1.7 ignores ``nonpad_kv_seqlen`` and reads ``is_causal`` as a mask from the upper left, without an
error: over a cache a decode step would see slot 0 alone. So the graphs use neither: every attention has a mask.
"""

from __future__ import annotations

from typing import Any

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


def check_attentions(trt: Any, network: Any, expected: int) -> None:
    """Raise TargetError unless there are ``expected`` attentions, each with a mask and without causality of its own."""
    found = attentions(trt, network)
    if len(found) != expected:
        raise TargetError(f"{network.name}: the parser made {len(found)} attentions of {expected}; the graph cannot be built")
    for attention in found:
        if attention.mask is None or attention.causal_kind != trt.CausalMaskKind.NONE:
            given = "no mask" if attention.mask is None else "the graph's mask"
            raise TargetError(
                f"{network.name}: an attention has {given} and causality {attention.causal_kind.name}, expected a mask alone; it "
                "would attend to other cache slots"
            )


def check_cache_updates(network: Any, updates: dict[str, str], expected: int) -> None:
    """Raise TargetError unless ``expected`` caches are network inputs, updated in place by network outputs."""
    inputs = {network.get_input(i).name for i in range(network.num_inputs)}
    outputs = {network.get_output(i).name for i in range(network.num_outputs)}
    if len(updates) != expected or not (set(updates) <= outputs and set(updates.values()) <= inputs):
        raise TargetError(f"{network.name}: expected {expected} caches updated in place, the parser made {updates or 'none'}")
