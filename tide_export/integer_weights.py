"""Weights ``w8a8``: products of integers, whose inputs are measured on a text first.

The text is the user's, or the Python language reference that every Python carries; a model without a tokenizer reads random ids.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from platform import python_version

import torch

from tide_export.head_bits import documentation
from tide_export.layerwise import layer_by_layer
from tide_export.load import LoadedModel
from tide_export.progress import ExportProgress
from tide_export.quantization.gptq import calibration_tokens
from tide_export.quantization.quantized_weight import INTEGER
from tide_export.quantization.quantizers import dequantize_parameters, integer_matrices
from tide_export.quantization.smoothing import smoothing_scales
from tide_export.quantized_parameters import QuantizedParameters
from tide_export.source_tokenizer import check_embedded

_WINDOWS, _WINDOW = 2, 512  # tokens; more changed SmolLM2's perplexity by less than its own error


def in_integers(loaded: LoadedModel, data: str | None, progress: ExportProgress) -> LoadedModel:
    """``loaded`` with int8 matrices for products of integers; an embedding that is not the head has 8 bits in blocks.

    Args:
        data: the text to measure the inputs on, as `load_documents` takes it; None: Python's documentation.

    Raises DataError if the text cannot be read or is too short.
    """
    model, source = loaded.model, loaded.parameters
    tokens = _tokens(loaded, data, progress)
    with progress.phase("measure the inputs of products"), layer_by_layer(model, source):
        smoothing = smoothing_scales(model, source, integer_matrices(model), tokens, loaded.loops)
    parameters = QuantizedParameters(source, model, 8, "rtn", loaded.quantized, smoothing)
    text = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    changed = replace(loaded, quantized=parameters.low_bits, weights=INTEGER, text=text, notes=tuple(parameters.notes))
    if loaded.streamed is not None:
        return replace(changed, streamed=parameters)
    made = {name: weight.made() for name, weight in parameters.low_bits.items()}
    dequantize_parameters(model, made)
    return replace(changed, quantized=made)


def _tokens(loaded: LoadedModel, data: str | None, progress: ExportProgress) -> torch.Tensor:
    """Ids [B, T] of the text."""
    config = loaded.model.config.get_text_config()
    window = min(_WINDOW, getattr(config, "max_position_embeddings", None) or _WINDOW)
    if data is not None:
        tokens = calibration_tokens(data, loaded.tokenizer, window, progress.note)
        check_embedded(int(tokens.max()), loaded.model, data)
        return tokens[:: -(-len(tokens) // _WINDOWS)]
    ids = documentation(loaded.tokenizer) if loaded.tokenizer is not None else []
    if len(ids) < _WINDOWS * window or max(ids) >= config.vocab_size:
        progress.note("the inputs of products are measured on random ids: the tokenizer knows no English")
        return torch.randint(config.vocab_size, (_WINDOWS, window), generator=torch.Generator().manual_seed(0))
    progress.note(f"the inputs of products are measured on {_WINDOWS * window} tokens of Python {python_version()}'s documentation")
    step = len(ids) // _WINDOWS
    return torch.tensor([ids[end - window : end] for end in range(step, len(ids) + 1, step)])
