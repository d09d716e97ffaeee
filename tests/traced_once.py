"""Graphs that torch traced before in this run: a trace of a tiny model takes seconds, and many tests export equal structures.

Weights have no part in a trace, so a model of the same structure gets a copy of the graph with its own weights. Graphs lie in
files without weights, as tests run in several processes.
"""

import hashlib
import os
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn
from torch.utils._pytree import tree_leaves

# What differs between models of one graph: set where a model was saved and loaded, or of its first weights and its tokens.
_NO_PART = (
    *("name_or_path", "_name_or_path", "architectures", "transformers_version"),
    *("initializer_range", "bos_token_id", "eos_token_id"),
)


def remembering(export: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """``export``, which is `torch.onnx.export`, for the calls of `tide_export.trace`, with a memory in ``folder``."""

    def remember(step: nn.Module, args: tuple, **options: Any) -> Any:
        key = _structure(step, args, options)
        if " at 0x" in key:  # an attribute that no text describes
            return export(step, args, **options)
        file = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.onnx"
        if not file.exists():
            _write(export(step, args, **options).model, _tensors(step), file)
        return SimpleNamespace(model=_with_weights_of(step, ir.load(file)))

    return remember


def _write(graph: ir.Model, weights: Collection[str], file: Path) -> None:
    """Write the graph, which keeps the weights' types and shapes only, and not where in the model each node is from: such notes
    are 19 of 20 bytes of it, and nothing reads them."""
    for node in graph.graph.all_nodes():
        for noted in (node, *node.outputs):
            noted.metadata_props.clear()
    for name, value in graph.graph.initializers.items():
        if name in weights and (tensor := value.const_value) is not None:
            value.const_value = ir.ExternalTensor("none", None, None, tensor.dtype, shape=tensor.shape, name=name)
    whole = file.with_suffix(f".{os.getpid()}")
    ir.save(graph, whole)
    whole.replace(file)  # another process may write the same


def _structure(step: nn.Module, args: tuple, options: dict[str, Any]) -> str:
    """All that a graph depends on: code (tests replace some), settings, shapes, and which weights are one."""
    modules = [(name, _code(module), _settings(module)) for name, module in step.named_modules()]
    tensors = _tensors(step)
    objects = [id(tensor) for tensor in tensors.values()]
    shapes = [(name, tensor.shape, tensor.dtype, objects.index(id(tensor))) for name, tensor in tensors.items()]
    inputs = [(leaf.shape, leaf.dtype) for leaf in tree_leaves(args)]
    config = {k: v for k, v in step.model.config.to_dict().items() if k not in _NO_PART}  # type: ignore[union-attr,operator]
    return repr((modules, config, shapes, inputs, options))


def _code(module: nn.Module) -> str:
    return f"{type(module)} {type(module).forward.__module__}.{type(module).forward.__qualname__}"


def _settings(module: nn.Module) -> dict[str, Any]:
    """Numbers, names and functions, not torch's own: `forward` is among them where it was replaced for one object."""
    return {
        name: value
        for name, value in vars(module).items()
        if name[0] != "_"
        and name not in _NO_PART
        and (value is None or isinstance(value, bool | int | float | str) or callable(value))
    }


def _tensors(step: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False)])


def _with_weights_of(step: nn.Module, graph: ir.Model) -> ir.Model:
    tensors = _tensors(step)
    for name, value in graph.graph.initializers.items():
        if name in tensors:
            value.const_value = TorchTensor(tensors[name], name=name)
    return graph
