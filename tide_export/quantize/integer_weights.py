"""Weights ``w8a8``: products of integers, whose inputs are measured on a text first.

The text is the user's, or the Python language reference that every Python carries; a model without a tokenizer reads random ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from platform import python_version

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tide_runtime.bundle.manifest import SMOOTHING_FILE, RoundingInfo
from torch import nn

from tide_export.progress import ExportProgress
from tide_export.quantize.gptq import calibration_tokens
from tide_export.quantize.head_bits import documentation, perplexity
from tide_export.quantize.layerwise import layer_by_layer
from tide_export.quantize.quantized_parameters import QuantizedParameters, in_memory
from tide_export.quantize.quantizers import integer_matrices
from tide_export.quantize.smoothing import smoothing_scales
from tide_export.sources.loaded_model import LoadedModel
from tide_export.sources.source_tokenizer import check_embedded, prompt_prefix
from tide_export.weights.deferred_weight import LowBits
from tide_export.weights.quantized_weight import INTEGER

# Tokens of the text that inputs, and the price of rounding them, are measured on. With 128, 256, 512 and 1,024 the perplexity of
# SmolLM2 was 0.2, 1.0, 1.1 and 0.9% above that of the file's weights: more tokens are no better.
_TOKENS = 256


def in_integers(loaded: LoadedModel, data: str | None, progress: ExportProgress) -> LoadedModel:
    """``loaded`` with int8 matrices for products of integers; an embedding that is not the head has 8 bits in blocks.

    Args:
        data: the text to measure the inputs on, as `load_documents` takes it; None: Python's documentation.

    Raises DataError if the text cannot be read or is too short.
    """
    model, source = loaded.model, loaded.parameters
    tokens = _tokens(loaded, data, progress)
    with progress.phase("measure the inputs of products"), layer_by_layer(model, source):
        modules = integer_matrices(model)
        found = smoothing_scales(model, source, modules, tokens, loaded.loops)
        smoothing = {name: found.get(name, _ones(module)) for name, module in modules.items()}
    parameters = QuantizedParameters(source, model, 8, loaded.quantized, smoothing)
    text = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    notes = tuple(parameters.notes)
    changed = replace(loaded, quantized=parameters.low_bits, weights=INTEGER, text=text, notes=notes, streamed=parameters)
    changed = changed if loaded.streamed is not None else in_memory(changed)
    return replace(changed, rounding=partial(_rounding, changed, smoothing, tokens[0]))


def _rounding(loaded: LoadedModel, smoothing: Mapping[str, NDArray[np.float32]], ids: torch.Tensor) -> RoundingInfo:
    """Perplexities of ``ids`` [T], in one pass of the model with the rounded matrices."""
    model = loaded.model
    windows = ids.expand(3, -1)

    def rounded(scales: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            states = inputs[0]
            if len(states) % 3:  # rows that a module routes, as one of experts: not told apart
                return inputs
            plain, eight, seven = states.chunk(3)
            return (torch.cat([plain, _rounded(eight, scales, 127), _rounded(seven, scales, 63)]), *inputs[1:])

        return hook

    with ExitStack() as stack, torch.no_grad():
        for name, module in integer_matrices(model).items():
            stack.callback(module.register_forward_pre_hook(rounded(torch.from_numpy(smoothing[name]))).remove)
        stack.enter_context(layer_by_layer(model, loaded.parameters))
        logits = model(input_ids=windows, use_cache=False).logits
    perplexities = (perplexity(one[None], windows[:1]) for one in logits)
    return RoundingInfo(*perplexities, text=f"{windows.shape[1]} tokens of the text that the inputs were measured on")


def _rounded(states: torch.Tensor, scales: torch.Tensor, largest: int) -> torch.Tensor:
    divided = states.float() / scales
    step = divided.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
    return ((divided / step).round() * step * scales).to(states.dtype)


def _ones(module: nn.Module) -> NDArray[np.float32]:
    weight = module.get_parameter("weight")
    return np.ones(weight.shape[1 if isinstance(module, nn.Linear) else 0], np.float32)


def write_smoothing(weights: Mapping[str, LowBits], directory: Path) -> None:
    """Write `SMOOTHING_FILE`, which adapters of the modules need, if an input of ``weights`` is divided by something."""
    scales = {name.removesuffix(".weight"): weight.smoothing for name, weight in weights.items() if weight.smoothing is not None}
    divided = {name: one for name, one in scales.items() if (one != 1).any()}
    if divided:
        save_file(divided, directory / SMOOTHING_FILE)


def _tokens(loaded: LoadedModel, data: str | None, progress: ExportProgress) -> torch.Tensor:
    """Ids [1, T] in the middle of the text."""
    config = loaded.model.config.get_text_config()
    window = min(_TOKENS, loaded.positions or _TOKENS)
    if data is not None:
        tokens = calibration_tokens(data, loaded.tokenizer, window, progress.note)
        check_embedded(int(tokens.max()), loaded.model, data)
        return tokens[len(tokens) // 2 :][:1, :window]
    ids = documentation(loaded.tokenizer) if loaded.tokenizer is not None else []
    if len(ids) < 2 * window or max(ids) >= config.vocab_size:
        progress.note("the inputs of products are measured on random ids: the tokenizer knows no English")
        return torch.randint(config.vocab_size, (1, window), generator=torch.Generator().manual_seed(0))
    progress.note(f"the inputs of products are measured on {window} tokens of Python {python_version()}'s documentation")
    return torch.tensor([[*prompt_prefix(loaded.tokenizer), *ids[len(ids) // 2 :]][:window]])
