"""Read HuggingFace checkpoints of GPTQ, AWQ, compressed-tensors and bitsandbytes without the packages that wrote them.

Each quantised matrix becomes a QuantizedWeight with the checkpoint's integers, and its dequantised form the model's parameter.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tide_runtime.errors import ModelFilesError
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from tide_export.sources.accounting import TensorHeader, check_names, check_values, read_headers, weight_files
from tide_export.sources.quantised.checkpoint_formats import CheckpointFormat, StoredModule, format_of
from tide_export.weights.quantized_weight import QuantizedWeight

# compressed-tensors' scales of activations and KV cache; TIDE takes the weights only.
ACTIVATION_SCALES = re.compile(r"\.(input|output|q|k|v)_(scale|zero_point|global_scale)$")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHER_LAYOUT = "the model stores them in another layout than the checkpoint"
# AutoGPTQ and GPTQModel, AutoAWQ, ModelOpt; in the order in which other loaders look for them.
_SETTINGS_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
# AutoAWQ's first names of the bits, the group size and the layout.
_AWQ_FIELDS = ("w_bit", "q_group_size", "zero_point")


class _Stored(dict[str, Any]):
    """Tensor name → its opened file. ``read_names``: the names that have been looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.read_names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read_names.add(name)
        return super().__getitem__(name)


@dataclass
class _Contents:
    """What a checkpoint holds: a state dict with dequantised matrices, the mapped ones, and the others' reasons."""

    state: dict[str, torch.Tensor] = field(default_factory=dict)
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    dequantized: dict[str, list[str]] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """A sentence for each reason, with the number and the kinds of the modules."""
        sentences = []
        for reason, names in self.dequantized.items():
            kinds = ", ".join(sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in names}))
            sentences.append(f"{len(names)} matrices ({kinds}) were dequantised, because {reason}.")
        return sentences


def load_quantized_checkpoint(
    source: str, config: PreTrainedConfig, dtype: torch.dtype, revision: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, dict[str, QuantizedWeight], list[str]]:
    """Load the checkpoint ``source``, a local directory or a hub id, whose ``config`` has a ``quantization_config``.

    Returns the model in eval mode with dequantised parameters of type ``dtype``, the mapped weights by parameter name, and
    sentences about what could not be mapped. Groups wider than 32 (8 bits: 64) are split into blocks of 32 of the same scale.

    Raises UnsupportedModelError for methods, layouts, bits and groups that are not taken, and ModelFilesError for files and
    tensors that are missing, truncated, or of another shape than the model's.
    """
    layout = format_of(_settings(config))
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(plain, dtype=dtype, trust_remote_code=trust_remote_code)
    with contextlib.ExitStack() as stack:
        try:
            files = weight_files(source, revision)
            read_headers(files)  # no tensor is in two files
            stored = _Stored()
            for file in files:
                opened = stack.enter_context(safe_open(file, framework="pt"))
                stored.update(dict.fromkeys(opened.keys(), opened))
            contents = _read(layout, stored, skeleton, dtype)
            if unread := sorted(stored.keys() - stored.read_names):
                raise ModelFilesError(
                    f"{source} holds {unread[0]}, which has no place beside the quantised tensors of its module "
                    f"({len(unread)} such tensors); download it again"
                )
            model, left_out = _model_of(source, revision, skeleton, contents.state, dtype)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ModelFilesError(f"cannot load {source}: {str(error).strip().partition(chr(10))[0]}") from error
    for name in [name for name in contents.quantized if not _is_matrix_of(model, name, contents.quantized[name].shape)]:
        del contents.quantized[name]
        contents.dequantized.setdefault(OTHER_LAYOUT, []).append(name)
    return model, contents.quantized, [*contents.notes(), *layout.notes, *left_out]


def find_settings(source: str, config: PreTrainedConfig, revision: str | None) -> None:
    """Set ``config.quantization_config`` where the settings are elsewhere. Raises ModelFilesError if a file is no JSON object."""
    if getattr(config, "quantization_config", None) is not None:
        return
    compression = getattr(config, "compression_config", None)
    inner = getattr(config.get_text_config(), "quantization_config", None)
    settings = inner or (compression and {"quant_method": "compressed-tensors", **compression})
    for name in _SETTINGS_FILES if settings is None else ():
        file = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            settings = _read_settings(Path(file))
            break
    if settings is not None:
        config.quantization_config = settings


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesError(f"{file.name} is no JSON file ({error}); download it again") from error
    if not isinstance(settings, dict):
        raise ModelFilesError(f"{file.name} holds no JSON object; download it again")
    if file.name == "hf_quant_config.json":
        method = "modelopt"
    else:
        method = "awq" if any(key in settings for key in _AWQ_FIELDS) or file.name == "quant_config.json" else "gptq"
    return {"quant_method": method, **settings}


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    settings = config.quantization_config
    return dict(settings) if isinstance(settings, Mapping) else settings.to_dict()


def _read(layout: CheckpointFormat, stored: _Stored, skeleton: PreTrainedModel, dtype: torch.dtype) -> _Contents:
    """All tensors of the checkpoint under the names of their parameters."""
    contents = _Contents()
    expected = skeleton.state_dict()
    ending = re.compile(rf"\.({'|'.join(map(re.escape, layout.parts))})$")
    modules = {name[: match.start()] for name in stored if (match := ending.search(name))}
    for name in sorted(modules):
        module = StoredModule(name, _matrix_shape(skeleton, name), stored)
        weight = f"{name}.weight"
        read = layout.read(module)
        if isinstance(read, QuantizedWeight):
            contents.quantized[weight] = read
            matrix = read.dequantized()
        else:
            contents.dequantized.setdefault(read.reason, []).append(weight)
            matrix = read.matrix
        transposed = isinstance(_submodule(skeleton, name), Conv1D)
        contents.state[weight] = torch.from_numpy(matrix.T if transposed else matrix).to(dtype).contiguous()
    for name in stored:
        module_name, _, last = name.rpartition(".")
        if ACTIVATION_SCALES.search(name):
            stored.read_names.add(name)
            continue
        if name in contents.state or ending.search(name):
            continue
        tensor = stored[name].get_tensor(name)
        if last == "bias" and module_name in modules and f"{module_name}.weight" in expected and name not in expected:
            if not tensor.any():  # AutoGPTQ wrote biases of zeros for layers without bias
                continue
        elif tensor.dtype not in FLOATS and (name not in expected or expected[name].is_floating_point()):
            raise ModelFilesError(
                f"{name} has type {tensor.dtype}, and the checkpoint has none of {', '.join(layout.parts)} to dequantise it"
            )
        contents.state[name] = tensor
    return contents


def _model_of(
    source: str, revision: str | None, skeleton: PreTrainedModel, state: dict[str, torch.Tensor], dtype: torch.dtype
) -> tuple[PreTrainedModel, list[str]]:
    """The model of ``skeleton``'s class with the tensors of ``state``, and what was left out of it.

    Raises ModelFilesError unless they fit exactly.
    """
    headers = {name: TensorHeader(tuple(tensor.shape), "F32") for name, tensor in state.items()}
    notes = check_names(source, skeleton, headers)
    loaded: tuple[PreTrainedModel, dict[str, Any]] = type(skeleton).from_pretrained(
        None, config=skeleton.config, state_dict=state, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    model, report = loaded
    check_values(source, model, report)
    model.config.name_or_path = source
    with contextlib.suppress(OSError):  # the file is optional
        model.generation_config = GenerationConfig.from_pretrained(source, revision=revision)
    return model.eval(), notes


def _submodule(model: PreTrainedModel, name: str) -> torch.nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _matrix_shape(model: PreTrainedModel, name: str) -> tuple[int, int] | None:
    """Output and input features of module ``name``; None if it is no matrix."""
    module = _submodule(model, name)
    if not isinstance(module, torch.nn.Linear | torch.nn.Embedding | Conv1D):
        return None
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)


def _is_matrix_of(model: PreTrainedModel, parameter: str, shape: tuple[int, int]) -> bool:
    module = _submodule(model, parameter.removesuffix(".weight"))
    return isinstance(module, torch.nn.Linear | torch.nn.Embedding) and tuple(module.weight.shape) == shape
