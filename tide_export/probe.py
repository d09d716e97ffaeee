"""Run two tokens through a loaded model with TIDE's layers to get what each layer keeps, or the reason to reject the model.

The probe takes seconds and runs before calibration and tracing, which take minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tide_runtime.bundle.manifest import LayerInfo
from tide_runtime.errors import TideError, UnsupportedModelError
from torch import nn
from transformers import PreTrainedModel

from tide_export.fake_parameters import fake_mode
from tide_export.traced_attention import TracedLayer, run_layers
from tide_export.traced_recurrence import tide_layers


def probe_layers(model: PreTrainedModel) -> tuple[LayerInfo, ...]:
    """What each layer keeps of a text. Raises UnsupportedModelError with the reason."""
    name = type(model).__name__
    start = torch.zeros(1, dtype=torch.long)
    layers = [TracedLayer({}, start) for _ in range(model.config.get_text_config().num_hidden_layers)]
    try:
        with torch.no_grad(), fake_mode(model), tide_layers(model), _complex_refused(name):
            run_layers(model, layers, torch.zeros((1, 2), dtype=torch.long), torch.arange(2)[None])
    except TideError:
        raise
    except Exception as error:  # the model's own code may raise anything
        raise UnsupportedModelError(
            f"{name} is not supported, because its forward pass fails with TIDE's attention and caches in place of its own "
            f"({type(error).__name__}: {error})"
        ) from error
    return tuple(layer.info for layer in layers)


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
