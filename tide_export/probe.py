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
from tide_export.traced_attention import KVShape, TracedCacheLayer, run_layers, tide_attention


def probe_attention(model: PreTrainedModel) -> tuple[KVShape, ...]:
    """Each layer's cache shape. Raises UnsupportedModelError with the reason."""
    name = type(model).__name__
    nothing, start = torch.empty(1, 0, 0, 0, dtype=model.dtype), torch.zeros(1, dtype=torch.long)
    layers = [TracedCacheLayer(nothing, nothing, start) for _ in range(model.config.get_text_config().num_hidden_layers)]
    try:
        with torch.no_grad(), fake_mode(model), tide_attention(model), _complex_refused(name):
            run_layers(model, layers, torch.zeros((1, 2), dtype=torch.long), torch.arange(2)[None])
    except TideError:
        raise
    except Exception as error:  # the model's own code may raise anything
        raise UnsupportedModelError(
            f"{name} is not supported, because its forward pass fails with TIDE's attention and KV cache in place of its own "
            f"({type(error).__name__}: {error}); TIDE compiles decoders whose every layer is softmax attention with a KV cache"
        ) from error
    return tuple(layer.shape for layer in layers if layer.shape is not None)


def check_cuts(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError unless the model can be cut between its layers, as early exits need it."""
    if reason := uncut_reason(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be cut between its layers and has no early exits, because {reason}; export it "
            "without a calibration and without --checkpoints"
        )


def uncut_reason(model: PreTrainedModel) -> str:
    """Why ``model`` is compiled as one graph; empty where it can be cut: a graph behind a cut gets the hidden state and nothing
    else of the step."""
    if any(shape.source is not None for shape in probe_attention(model)):
        return "later layers read the keys and values of earlier ones"
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0):
        return "each of its layers reads the token ids"
    return ""


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
