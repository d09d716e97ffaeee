"""Run two tokens through a loaded model with TIDE's attention to get each layer's cache shape, or the reason to reject it.

The probe takes seconds and runs before calibration and tracing, which take minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tide_runtime.errors import TideError, UnsupportedModelError
from torch import nn
from transformers import PreTrainedModel

from tide_export.fake_parameters import fake_mode
from tide_export.long_rotary import both_factors
from tide_export.traced_attention import KVShape, TracedCacheLayer, run_layers, tide_attention


def probe_attention(model: PreTrainedModel) -> tuple[KVShape, ...]:
    """Each layer's cache shape. Raises UnsupportedModelError with the reason."""
    name = type(model).__name__
    nothing, start = torch.empty(1, 0, 0, 0, dtype=model.dtype), torch.zeros(1, dtype=torch.long)
    layers = [TracedCacheLayer(nothing, nothing, start) for _ in range(model.config.get_text_config().num_hidden_layers)]
    try:
        with torch.no_grad(), both_factors(model), fake_mode(model), tide_attention(model), _complex_refused(name):
            run_layers(model, layers, torch.zeros((1, 2), dtype=torch.long), torch.arange(2)[None])
    except TideError:
        raise
    except Exception as error:  # the model's own code may raise anything
        raise UnsupportedModelError(
            f"{name} is not supported, because its forward pass fails with TIDE's attention and KV cache in place of its own "
            f"({type(error).__name__}: {error}); TIDE compiles decoders whose every layer is softmax attention with a KV cache"
        ) from error
    return tuple(layer.shape for layer in layers if layer.shape is not None)


@contextmanager
def _complex_refused(name: str) -> Iterator[None]:
    """Reject modules that output complex numbers, which some models use for rotary embeddings."""

    def check(module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.is_complex():
            raise UnsupportedModelError(
                f"{name} is not supported, because {type(module).__name__} computes with complex numbers, which torch cannot "
                "export to ONNX; an implementation of the model with cosines and sines can be exported"
            )

    hook = nn.modules.module.register_module_forward_hook(check)
    try:
        yield
    finally:
        hook.remove()
