"""A GGUF file as a model of transformers, with the file's quantised blocks kept next to the parameters.

Every tensor is dequantised (`dequantize` of the package gguf), and transformers renames it, and for some architectures puts its
rows into another order. Which block belongs to which row is not assumed: rows of the tensor and of the parameter are compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from tide_runtime.errors import ModelFilesError, TideError, UnsupportedModelError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from tide_export.accounting import check_values
from tide_export.quantization.gguf_architectures import read_config
from tide_export.quantization.gguf_blocks import mapped
from tide_export.quantization.gguf_file import PLAIN, GgufTensor, read_file
from tide_export.quantization.gguf_generation import generation_config
from tide_export.quantization.gguf_rope import FREQUENCY_FACTORS, divide_frequencies
from tide_export.quantization.quantized_weight import QuantizedWeight

_LAYER = re.compile(r"blk\.(\d+)\.")
# What transformers raises for values of a file that make no model; NotImplementedError is a RuntimeError.
_UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    OSError,
    StrictDataclassError,
)


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedConfig, PreTrainedModel, dict[str, QuantizedWeight], list[str]]:
    """Config, eager model, low-bit weights by parameter name, and notes on those that could not be kept.

    Raises ModelFilesError for a broken file, UnsupportedModelError for an architecture or a key that the model has no place for.
    """
    keys, tensors = read_file(path)
    reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        config = read_config(keys, {name: tensor.shape for name, tensor in tensors.items()})
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        state = _state(path.name, skeleton, keys.architecture, tensors)
        loaded: tuple[PreTrainedModel, Mapping[str, Collection]] = type(skeleton).from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, **reported
        )
    except TideError:
        raise
    except _UNREADABLE as error:
        raise UnsupportedModelError(
            f"{path.name} cannot be loaded, architecture {keys.architecture!r} ({first_line(error)}); convert the model from "
            "its HuggingFace checkpoint, or export that checkpoint itself"
        ) from error
    model, info = loaded
    check_values(path.name, model, info)
    if (factors := tensors.get(FREQUENCY_FACTORS)) is not None:
        divide_frequencies(model, torch.from_numpy(np.array(factors.data, np.float32)))
    model.generation_config = generation_config(keys, config.vocab_size)
    quantized, notes = match_parameters(model, keys.architecture, tensors)
    _convert(model, dtype)
    return config, model, quantized, notes


def _convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert what the file holds. Rotary frequencies stay in fp32: rounded to fp16 they turn by a radian at position 2,000."""
    stored = model.state_dict().keys()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if name in stored and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def first_line(error: Exception) -> str:
    """What ``error`` says; a heading together with the line below it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])


def _state(file: str, model: PreTrainedModel, architecture: str, tensors: Mapping[str, GgufTensor]) -> dict[str, torch.Tensor]:
    """fp32 tensors by the name of ``model``'s parameter, in transformers' order of rows."""
    import gguf

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    _check_tensors(file, model, architecture, names, tensors)
    state: dict[str, torch.Tensor] = {}
    read = {"tensor_key_mapping": names, "parsed_parameters": {"tensors": state}}  # experts go there
    for tensor in tensors.values():
        values = gguf.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.kind])
        done = processor.process(weights=values, name=tensor.name, **read)
        if done.name in names:
            state[names[done.name]] = torch.from_numpy(np.array(done.weights, np.float32))
    return state


def _check_tensors(
    file: str, model: PreTrainedModel, architecture: str, mapping: Mapping[str, str], tensors: Mapping[str, GgufTensor]
) -> None:
    """Raise ModelFilesError unless each parameter has its tensors and each tensor its parameter. ``mapping``: transformers'."""
    names = {_with_suffix(name): parameter for name, parameter in mapping.items()}
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    missing = {name for name, parameter in names.items() if name not in tensors and parameter not in tied}
    unknown = {name for name in tensors if name not in names and not _without_effect(name, architecture)}
    layers = model.config.get_text_config().num_hidden_layers
    beyond = {name for name in unknown if (found := _LAYER.match(name)) and int(found[1]) >= layers}
    remedy = "the file was changed or its conversion went wrong: download it again, or convert the model again"
    if beyond:
        raise ModelFilesError(f"{file} has the tensor {min(beyond)}, but its config says {layers} layers; {remedy}")
    if missing:
        raise ModelFilesError(
            f"{file} has no tensor {min(missing)} for {names[min(missing)]}, which its config expects; {remedy}"
        )
    if unknown:
        raise ModelFilesError(
            f"{file} has the tensor {min(unknown)}, which the architecture {architecture!r} has no place for, so the bundle "
            f"would be another model; export the HuggingFace checkpoint that the file was made from"
        )


def _with_suffix(name: str) -> str:
    """transformers' table has the experts' tensors without it."""
    return name if name.endswith((".weight", ".bias")) else f"{name}.weight"


def _without_effect(name: str, architecture: str) -> bool:
    """Rotary frequencies that llama.cpp skips; those that it divides by are applied."""
    return name.endswith("attn_rot_embd.weight") or (name == FREQUENCY_FACTORS and architecture == "llama")


def match_parameters(
    model: PreTrainedModel, architecture: str, tensors: Mapping[str, GgufTensor]
) -> tuple[dict[str, QuantizedWeight], list[str]]:
    """Low-bit weights by parameter name, and a note for each kind of tensor that was dequantised instead."""
    names = _gguf_names(model, architecture)
    found: dict[str, QuantizedWeight] = {}
    lost: Counter[tuple[str, str]] = Counter()
    used = set()
    low_bit = {name: tensor for name, tensor in tensors.items() if tensor.kind not in PLAIN}
    for name, parameter in model.named_parameters():
        tensor = low_bit.get(names.get(name, ""))
        if tensor is None:
            continue
        used.add(tensor.name)
        if tensor.data.ndim != 2:
            lost[tensor.kind, "holds the matrices of several experts"] += 1
            continue
        weight = mapped(tensor.data, tensor.kind)
        if weight is None:
            lost[tensor.kind, "has no layout that the kernels take"] += 1
            continue
        order = _row_order(tensor, parameter)
        if order is None:
            lost[tensor.kind, "is stored in another form than transformers' parameter"] += 1
        else:
            found[name] = weight.rows(order)
    for tensor in low_bit.values():
        if tensor.name not in used:
            lost[tensor.kind, "has no parameter of its own in transformers' model"] += 1
    return found, [f"{count} tensors of type {kind} were dequantised: that {why}" for (kind, why), count in sorted(lost.items())]


def _gguf_names(model: PreTrainedModel, architecture: str) -> dict[str, str]:
    """Parameter name → the tensor's name in the file."""
    import gguf

    kinds = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        raise UnsupportedModelError(f"the file's architecture {architecture!r} is unknown to gguf; upgrade the package gguf")
    table = gguf.get_tensor_name_map(kinds[architecture], model.config.get_text_config().num_hidden_layers)
    pairs = ((name, table.get_name(name, try_suffixes=(".weight", ".bias"))) for name, _ in model.named_parameters())
    return {name: found for name, found in pairs if found is not None}


def _row_order(tensor: GgufTensor, parameter: torch.Tensor) -> NDArray[np.int64] | None:
    """The tensor's row for each row of the parameter; None where the rows are not the same."""
    import gguf

    stored = np.ascontiguousarray(gguf.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.kind]))
    loaded = np.ascontiguousarray(parameter.detach().numpy())
    if stored.shape != loaded.shape:
        return None
    if np.array_equal(stored, loaded):
        return np.arange(len(stored))
    places = {row.tobytes(): place for place, row in enumerate(stored)}
    order = [places.get(row.tobytes(), -1) for row in loaded]
    return None if -1 in order else np.array(order)
