"""A GGUF file as a model: transformers builds the model from it, its quantised blocks are kept beside the parameters.

transformers dequantises every tensor (`dequantize` of the package gguf), renames it, and for some architectures puts its rows
into another order. Which block belongs to which row is not assumed: rows of the tensor and of the parameter are compared.
"""

from __future__ import annotations

import io
import re
import struct
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from tide_runtime.errors import ModelFilesError, UnsupportedModelError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tide_export.quantization.gguf_blocks import mapped
from tide_export.quantization.quantized_weight import QuantizedWeight

_PLAIN = ("F32", "F16", "BF16")
_MAGIC = b"GGUF"
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


@dataclass(frozen=True)
class GgufTensor:
    """Low-bit weights of the file. ``data``: [N, bytes of a row], experts [E, N, bytes]; ``kind``: GGUF's quantisation type."""

    name: str
    kind: str
    data: NDArray[np.uint8]


def is_gguf(source: str) -> bool:
    """Whether ``source`` names a GGUF file, by its suffix or its first bytes."""
    path = Path(source)
    if source.endswith(".gguf"):
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def read_tensors(path: Path) -> tuple[str, dict[str, GgufTensor]]:
    """Architecture and quantised tensors of the file by GGUF name.

    Raises ModelFilesError when the file is missing, no GGUF file, or cut short.
    """
    import gguf

    if not path.is_file():
        raise ModelFilesError(f"there is no file {path}; give a .gguf file, a model directory, or a hub id such as org/name")
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ModelFilesError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}; download it again")
    try:
        reader = gguf.GGUFReader(path)
        field = reader.get_field("general.architecture")
        architecture = str(field.contents()) if field is not None else ""
        tensors = {t.name: GgufTensor(t.name, t.tensor_type.name, t.data) for t in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, struct.error) as error:
        raise ModelFilesError(
            f"{path} cannot be read ({first_line(error)}): it was cut short or changed, or is newer than the package "
            "gguf; download it again, or upgrade gguf"
        ) from error
    if not architecture:
        raise ModelFilesError(f"{path} names no architecture (general.architecture); convert the model again")
    return architecture, {name: t for name, t in tensors.items() if t.kind not in _PLAIN}


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedConfig, PreTrainedModel, dict[str, QuantizedWeight], list[str]]:
    """Config, eager model, low-bit weights by parameter name, and notes on those that could not be kept.

    Raises ModelFilesError for a broken file, UnsupportedModelError for an architecture that transformers cannot read from GGUF.
    """
    architecture, tensors = read_tensors(path)
    options = {"gguf_file": path.name}
    reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    folder = str(path.resolve().parent)
    try:
        with redirect_stderr(io.StringIO()):  # transformers' bar over the tensors has no setting
            config = AutoConfig.from_pretrained(folder, **options)
            loaded: tuple[PreTrainedModel, Mapping[str, Collection]] = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, **reported, **options
            )
    except _UNREADABLE as error:
        raise UnsupportedModelError(
            f"{path.name} cannot be loaded, architecture {architecture!r} ({first_line(error)}); convert the model from "
            "its HuggingFace checkpoint, or export that checkpoint itself"
        ) from error
    model, info = loaded
    _check_complete(path.name, model, info, tensors)
    quantized, notes = match_parameters(model, architecture, tensors)
    return config, model.to(dtype), quantized, notes


def first_line(error: Exception) -> str:
    """What ``error`` says; a heading together with the line below it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])


def _check_complete(file: str, model: PreTrainedModel, info: Mapping[str, Collection], tensors: Mapping[str, GgufTensor]) -> None:
    """Raise ModelFilesError where tensors and config disagree: transformers gives a parameter without a tensor random values."""
    remedy = "the file was changed or its conversion went wrong: download it again, or convert the model again"
    if info["mismatched_keys"]:
        name, stored, expected = min(info["mismatched_keys"])
        raise ModelFilesError(f"in {file} {name} has shape {tuple(stored)}, its config expects {tuple(expected)}; {remedy}")
    if info["missing_keys"]:
        raise ModelFilesError(f"{file} has no tensor for {min(info['missing_keys'])}, which its config expects; {remedy}")
    layers = model.config.get_text_config().num_hidden_layers
    beyond = [name for name in tensors if (found := _LAYER.match(name)) and int(found[1]) >= layers]
    if beyond:
        raise ModelFilesError(f"{file} has the tensor {min(beyond)}, but its config says {layers} layers; {remedy}")


def match_parameters(
    model: PreTrainedModel, architecture: str, tensors: Mapping[str, GgufTensor]
) -> tuple[dict[str, QuantizedWeight], list[str]]:
    """Low-bit weights by parameter name, and a note for each kind of tensor that was dequantised instead."""
    names = _gguf_names(model, architecture)
    found: dict[str, QuantizedWeight] = {}
    lost: Counter[tuple[str, str]] = Counter()
    used = set()
    for name, parameter in model.named_parameters():
        tensor = tensors.get(names.get(name, ""))
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
    for tensor in tensors.values():
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
