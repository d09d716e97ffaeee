"""A GGUF file as a model of transformers with fake parameters, whose values stay in the file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from tide_runtime.bundle.embedding_info import EmbeddingInfo
from tide_runtime.errors import TideError, UnsupportedModelError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tide_export.model.embedding_model import give_states
from tide_export.model.fake_parameters import convert, without_parameters
from tide_export.sources.gguf.gguf_architectures import read_config
from tide_export.sources.gguf.gguf_embedding import read_pooling
from tide_export.sources.gguf.gguf_file import read_file
from tide_export.sources.gguf.gguf_generation import generation_config, sampling_note
from tide_export.sources.gguf.gguf_metadata import Metadata
from tide_export.sources.gguf.gguf_parameters import GgufParameters
from tide_export.sources.gguf.gguf_rope import FREQUENCY_FACTORS, divide_frequencies

# What transformers raises for values of a file that make no model; NotImplementedError is a RuntimeError.
UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    OSError,
    StrictDataclassError,
)


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, GgufParameters, EmbeddingInfo | None]:
    """The model with fake parameters in ``dtype``, their values, and how it embeds texts, where it does: see `give_states`.

    Raises ModelFilesError for a broken file, UnsupportedModelError for an architecture or a key that the model has no place for.
    """
    keys, tensors = read_file(path)
    embedding = read_pooling(keys)
    try:
        config = read_config(keys, tensors)
        model = without_parameters(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32))
        # Buffers stay in fp32: rotary frequencies that are rounded to fp16 turn by a radian at position 2,000.
        convert(model, dtype)
        if embedding is not None:
            give_states(model)
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("output.")}
        unused = _unused(keys, config, tensors)
        parameters = GgufParameters(path.name, model, keys.architecture, {n: t for n, t in tensors.items() if n not in unused})
        if unused:
            parameters.notes.append(
                f"{len(unused)} tensors were left out, such as {min(unused)}: the model's own output does not depend on them"
            )
        if (factors := tensors.get(FREQUENCY_FACTORS)) is not None:
            divide_frequencies(model, torch.from_numpy(np.array(factors.data, np.float32)))
    except TideError:
        raise
    except UNREADABLE as error:
        raise UnsupportedModelError(
            f"{path.name} cannot be loaded, architecture {keys.architecture!r} ({first_line(error)}); convert the model from "
            "its HuggingFace checkpoint, or export that checkpoint itself"
        ) from error
    model.generation_config = generation_config(keys, config.vocab_size)
    if (note := sampling_note(keys)) is not None:
        parameters.notes.append(note)
    return model, parameters, embedding


def _unused(keys: Metadata, config: PreTrainedConfig, tensors: Collection[str]) -> set[str]:
    """Those of layers that only draft further tokens, and keys and values of layers that take an earlier layer's."""
    layers = config.num_hidden_layers
    drafting = range(layers, keys.take("block_count")) if keys.take("nextn_predict_layers", 0) else ()
    taking = range(layers - keys.take("attention.shared_kv_layers", 0), layers)
    prefixes = [f"blk.{layer}." for layer in drafting]
    prefixes += [f"blk.{layer}.{name}." for layer in taking for name in ("attn_k", "attn_v", "attn_k_norm")]
    return {name for name in tensors if name.startswith(tuple(prefixes))}


def first_line(error: Exception) -> str:
    """What ``error`` says; a heading together with the line below it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
