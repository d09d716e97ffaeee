"""Run two tokens through a loaded model with TIDE's layers to get what each layer keeps, or the reason to reject the model.

Caches are added as the model's code uses them: a looped model has those of its layers for each loop.

The probe takes seconds and runs before calibration and tracing, which take minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from tide_runtime.bundle.manifest import LayerInfo
from tide_runtime.errors import TideError, UnsupportedModelError
from torch import nn
from transformers import PreTrainedModel

from tide_export.model.attention_masks import check_masks, recorded_windows
from tide_export.model.boundaries import at_boundaries
from tide_export.model.fake_parameters import fake_mode
from tide_export.model.long_rotary import both_factors
from tide_export.model.model_code import failing_code
from tide_export.model.traced_attention import ATTENTION_NAME, TracedLayer, run_layers
from tide_export.model.traced_recurrence import tide_layers


def probe_layers(model: PreTrainedModel) -> tuple[LayerInfo, ...]:
    """What each layer keeps of a text, in each loop. Raises UnsupportedModelError with the reason."""
    name = type(model).__name__
    calls = [0]
    _check_kind(model)
    start = torch.zeros(1, dtype=torch.long)
    layers = [TracedLayer({}, start) for _ in range(model.config.get_text_config().num_hidden_layers)]
    try:
        with (
            torch.no_grad(),
            both_factors(model),
            fake_mode(model),
            tide_layers(model),
            _complex_refused(name),
            recorded_windows(model.config.get_text_config(), [ATTENTION_NAME, "sdpa"]) as masks,
            at_boundaries(model, lambda boundary, _: calls.append(boundary)),
        ):
            run_layers(model, layers, torch.zeros((1, 2), dtype=torch.long), torch.arange(2)[None])
        check_masks(model.config.get_text_config(), layers, masks)
    except UnsupportedModelError as error:  # of one layer's code, which has no name for the model
        if name in str(error):
            raise
        raise UnsupportedModelError(f"{name}: {error}") from error
    except TideError:
        raise
    except Exception as error:  # the model's own code may raise anything
        raise UnsupportedModelError(
            f"{name} is not supported, because {failing_code(model, error)} cannot run with TIDE's attention and caches in place "
            "of its own; please report the model's config"
        ) from error
    if calls[-1] != len(layers):
        raise UnsupportedModelError(
            f"{name} is not supported, because it calls decoder layers {calls[-1]} times and has {len(layers)} caches: a layer "
            "that runs several times needs keys and values for each"
        )
    return tuple(layer.info for layer in layers)


def _check_kind(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError where a part of the model computes what no marker stands for, although it may run."""
    for module in model.modules():
        kind = type(module).__name__
        if "Indexer" in kind:
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported, because its attention is sparse: {kind} chooses for each token the "
                "earlier ones that it attends to; TIDE's sees all of them, or a window"
            )
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported, because {kind} counts a token's position from those before it that "
                "are not padding; TIDE compiles decoders whose positions are places in the text"
            )


def check_cuts(model: PreTrainedModel, layers: Sequence[LayerInfo]) -> None:
    """Raise UnsupportedModelError unless the model can be cut between its ``layers``, as early exits need it."""
    if reason := uncut_reason(model, layers):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be cut between its layers and has no early exits, because {reason}; export it "
            "without a calibration and without --checkpoints"
        )


def uncut_reason(model: PreTrainedModel, layers: Sequence[LayerInfo]) -> str:
    """Why ``model``, whose layers keep ``layers``, is compiled as one graph; empty where it can be cut: a graph behind a cut gets
    the hidden state and nothing else of the step."""
    if any(layer.kv_source is not None for layer in layers):
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
