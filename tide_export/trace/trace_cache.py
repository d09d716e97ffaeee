"""Traces in the machine's cache: a second model of the same shape and code is not traced.

A trace is kept without parameters, by all that it could depend on: the classes, attributes, buffers and shapes of the model's
modules, its configuration, the versions of the packages and of this one's files. It becomes a model only with the parameters of
the one at hand, and only where verification then compares the bundle with that model.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from tide_runtime.bundle.manifest import LayerInfo
from tide_runtime.machine_cache import CachedFiles, cache_folder
from transformers import PreTrainedModel

from tide_export.trace.repeated_layers import module_forms

_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript")
_KNOWN_CODE = ("transformers.", "tide_export.")  # other code has no version
_PREFIX = "model."  # prefix of parameter names in a trace
_FILE_KEYS = ("_name_or_path", "name_or_path", "transformers_version", "architectures")  # keys that describe files


def kept_trace(model: PreTrainedModel, kept: Sequence[LayerInfo], trace: Callable[[], ir.Model]) -> ir.Model:
    """What ``trace`` returns, from the cache where it is known."""
    described = _description(model, kept)
    if not type(model).__module__.startswith(_KNOWN_CODE) or " at 0x" in described:  # an object that no text describes
        return trace()
    files = CachedFiles(cache_folder("traces"))
    key = hashlib.sha256(described.encode()).hexdigest()
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        if (found := files.load(key)) is not None:
            return _with_parameters(found[1], model, found[0]["initializers"])
    traced = trace()
    names = [*traced.graph.initializers]
    content = _without_parameters(traced, model)
    with suppress(OSError, RuntimeError):
        files.store(key, {"initializers": names}, content)
    return _with_parameters(content, model, names)  # as it is found the next time: nodes are numbered on from those of a graph


def _without_parameters(traced: ir.Model, model: PreTrainedModel) -> bytes:
    """``traced`` without the initializers that are parameters of ``model``: inputs take their place."""
    copy = traced.clone()
    parameters = _parameters(model)
    for name in [name for name in copy.graph.initializers if name in parameters]:
        value = copy.graph.initializers.pop(name)
        value.const_value = None
        copy.graph.inputs.append(value)
    return ir.to_proto(copy).SerializeToString()


def _with_parameters(content: bytes, model: PreTrainedModel, names: Sequence[str]) -> ir.Model:
    """The trace in ``content`` with all its initializers, ``names`` in their order."""
    traced = ir.from_proto(onnx.ModelProto.FromString(content))
    graph = traced.graph
    parameters = _parameters(model)
    constants = {name: graph.initializers.pop(name) for name in [*graph.initializers]}
    values = {value.name: value for value in graph.inputs}
    for name in names:
        if name in constants:
            graph.register_initializer(constants[name])
            continue
        value = values[name]
        graph.inputs.remove(value)
        value.const_value = TorchTensor(parameters[name].detach(), name=name)
        graph.register_initializer(value)
    return traced


def _parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Name in a trace → parameter."""
    return {f"{_PREFIX}{name}": one for name, one in model.named_parameters(remove_duplicate=False)}


def _description(model: PreTrainedModel, kept: Sequence[LayerInfo]) -> str:
    numbers = dict[int, int]()
    shared = [numbers.setdefault(id(one), len(numbers)) for one in _parameters(model).values()]  # the same parameter twice
    config = {name: value for name, value in model.config.to_dict().items() if name not in _FILE_KEYS}
    code = [(type(module), type(module).forward.__module__, type(module).forward.__qualname__) for module in model.modules()]
    return repr([config, code, *module_forms(model), shared, tuple(kept), _tools()])


@cache
def _tools() -> tuple[str, ...]:
    """What made a trace: versions of packages, and this one's files."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return (sys.version, digest.hexdigest(), *(version(package) for package in _PACKAGES))
