"""Trace the first layers of a model and repeat their nodes for the others, as tracing a layer costs a second.

Layers are of one *kind* if they have the same modules with the same attributes and shapes. The nodes of a kind are taken from its
last layer that was traced, and only if those of the traced layer before it are the same: code that reads its layer's number
would differ. Code that treats every fourth layer in another way without an attribute that says so would not, so layers are
repeated only where verification then compares each segment with the unmodified model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from tide_runtime.bundle.manifest import LayerInfo
from torch import nn
from transformers import PreTrainedModel

_PLAIN = (bool, int, float, str, torch.dtype, type(None))
_NUMBER = "layer_idx"  # transformers' name for a layer's number, which chooses its cache
_FIRST_CACHE = 3  # inputs before the caches
_FIRST_OUTPUT = 1


def traced_depth(model: PreTrainedModel, layers: nn.ModuleList) -> int:
    """How many layers to trace: after them come only kinds that two of them have."""
    kinds = layer_kinds(model, layers)
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0):  # one table holds the inputs of all layers
        return len(kinds)
    for depth in range(2, len(kinds) - 1):
        seen = Counter(kinds[:depth])
        if all(seen[kind] > 1 for kind in kinds[depth:]):
            return depth
    return len(kinds)


def layer_kinds(model: PreTrainedModel, layers: nn.ModuleList) -> list[Hashable]:
    types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    return [(kind, *module_forms(layer)) for kind, layer in zip(types, layers, strict=True)]


def module_forms(model: nn.Module) -> list[Hashable]:
    """What each module of ``model`` is, but for the values of its parameters."""
    return [*map(_form, model.named_modules())]


def _form(named: tuple[str, nn.Module]) -> Hashable:
    """Name, class, attributes, and the tensors of a module, without those of the modules inside it."""
    name, module = named
    attributes = [
        (key, value if isinstance(value, _PLAIN) else repr(value) if isinstance(value, (list, tuple, dict)) else type(value))
        for key, value in vars(module).items()
        if key != _NUMBER and not key.startswith("_")
    ]
    parameters = [(key, one.shape, one.dtype) for key, one in module._parameters.items() if one is not None]
    buffers = [(key, tuple(one.flatten().tolist())) for key, one in module._buffers.items() if one is not None]
    return name, type(module), tuple(attributes), tuple(parameters), tuple(buffers)


def of_first_layers(kept: Sequence[LayerInfo], layers: int, depth: int) -> tuple[LayerInfo, ...]:
    """What the first ``depth`` of ``layers`` layers keep, in each loop."""
    return tuple(one for call, one in enumerate(kept) if call % layers < depth)


@contextmanager
def first_layers(model: PreTrainedModel, layers: nn.ModuleList, depth: int) -> Iterator[nn.ModuleList]:
    """Context in which ``model`` has its first ``depth`` layers only."""
    if depth == len(layers):
        yield layers
        return
    owner = next(module for module in model.modules() if any(child is layers for child in module.children()))
    name = next(name for name, child in owner.named_children() if child is layers)
    config, shortened = model.config.get_text_config(), nn.ModuleList(layers[:depth])
    count = config.num_hidden_layers
    setattr(owner, name, shortened)
    config.num_hidden_layers = depth
    try:
        yield shortened
    finally:
        setattr(owner, name, layers)
        config.num_hidden_layers = count


def repeat_layers(traced: ir.Model, model: PreTrainedModel, layers: nn.ModuleList, kept: Sequence[LayerInfo], depth: int) -> bool:
    """Add the layers from ``depth`` on to each loop of a trace of the first, in place; False where the nodes of a kind differ.

    Inputs of ``traced``: three, and what each layer keeps; outputs: logits, and the same.

    Args:
        kept: by all layers, in each loop.
    """
    graph, kinds = traced.graph, layer_kinds(model, layers)
    prefix = next(f"model.{name}" for name, module in model.named_modules() if module is layers)
    regions = _regions(graph, of_first_layers(kept, len(layers), depth), depth)
    loops = [regions[first : first + depth] for first in range(0, len(regions), depth)]
    sources: dict[tuple[int, Hashable], _Region] = {}
    for (loop, own), kind in product(enumerate(loops), dict.fromkeys(kinds[depth:])):
        before, last = [own[i] for i in range(depth) if kinds[i] == kind][-2:]
        if not last.is_closed(graph) or not _same(last, before, prefix):
            return False
        sources[loop, kind] = last
    caches, results = list[ir.Value](), list[ir.Value]()
    for loop, own in enumerate(loops):
        end, hidden = own[-1].end, own[-1].end.inputs[0]
        for number, region in enumerate(own):
            region.begin.attributes["index"] = ir.AttrInt64("index", loop * len(layers) + number)
            caches += region.caches
            results += region.results
        for number in range(depth, len(layers)):
            assert hidden is not None
            boundary = loop * len(layers) + number
            copied = _repeat(graph, model, sources[loop, kinds[number]], prefix, number, boundary, hidden, end)
            hidden = copied.output
            caches += copied.caches
            results += copied.results
        end.replace_input_with(0, hidden)
        end.attributes["index"] = ir.AttrInt64("index", (loop + 1) * len(layers))
    graph.inputs[_FIRST_CACHE:] = caches
    graph.outputs[_FIRST_OUTPUT:] = results
    return True


@dataclass(frozen=True)
class _Region:
    """The ``nodes`` of layer ``number`` in one loop, from after the boundary node ``begin`` to the boundary node ``end``.

    ``caches``, ``results``: inputs and outputs of the graph for what the layer keeps.
    """

    number: int
    begin: ir.Node
    nodes: list[ir.Node]
    end: ir.Node
    caches: tuple[ir.Value, ...]
    results: tuple[ir.Value, ...]

    def is_closed(self, graph: ir.Graph) -> bool:
        """Whether nothing else reads what the layer makes, but for its output and caches."""
        inside = {*self.nodes, self.end}
        made = [value for node in self.nodes for value in node.outputs]
        outer = {value for value in made if value.is_graph_output()}
        return outer == set(self.results) and all(node in inside for value in made for node, _ in value.uses())


def _regions(graph: ir.Graph, kept: Sequence[LayerInfo], depth: int) -> list[_Region]:
    """Those of all calls of ``depth`` layers."""
    nodes, places = list(graph), {}
    counts = [2 * layer.attends + len(layer.states) for layer in kept]
    begins = [0, *accumulate(counts)]
    for place, node in enumerate(nodes):
        if node.op_type == "Boundary":
            places[int(node.attributes["index"].value)] = place
    return [
        _Region(
            call % depth,
            nodes[places[call]],
            nodes[places[call] + 1 : places[call + 1]],
            nodes[places[call + 1]],
            tuple(graph.inputs)[_FIRST_CACHE + begin : _FIRST_CACHE + begin + count],
            tuple(graph.outputs)[_FIRST_OUTPUT + begin : _FIRST_OUTPUT + begin + count],
        )
        for call, (begin, count) in enumerate(zip(begins, counts, strict=False))
    ]


def _same(region: _Region, other: _Region, prefix: str) -> bool:
    """Whether both compute the same of their inputs, caches and parameters."""
    if len(region.nodes) != len(other.nodes):
        return False
    pairs: dict[ir.Value, ir.Value] = dict(zip(region.caches, other.caches, strict=True))
    pairs[region.begin.outputs[0]] = other.begin.outputs[0]
    for node, twin in zip(region.nodes, other.nodes, strict=True):
        if node.op_identifier() != twin.op_identifier() or len(node.outputs) != len(twin.outputs):
            return False
        if _attributes(node) != _attributes(twin) or len(node.inputs) != len(twin.inputs):
            return False
        names = f"{prefix}.{region.number}.", f"{prefix}.{other.number}."
        if not all(_same_value(a, b, pairs, *names) for a, b in zip(node.inputs, twin.inputs, strict=True)):
            return False
        pairs |= zip(node.outputs, twin.outputs, strict=True)
    ends = ((region.end.inputs[0], other.end.inputs[0]), *zip(region.results, other.results, strict=True))
    return all(a is not None and pairs.get(a) is b for a, b in ends)


def _attributes(node: ir.Node) -> dict[str, object]:
    def plain(attribute: ir.Attr) -> object:
        value = attribute.value
        return value.tobytes() if isinstance(value, ir.TensorProtocol) else value

    return {key: plain(attribute) for key, attribute in node.attributes.items()}


def _same_value(
    value: ir.Value | None, other: ir.Value | None, pairs: Mapping[ir.Value, ir.Value], name: str, other_name: str
) -> bool:
    if value is None or other is None or value in pairs:
        return (pairs.get(value) if value is not None else None) is other
    if (value.name or "").startswith(name):
        return value.name == f"{name}{(other.name or '').removeprefix(other_name)}"
    if value.const_value is None or other.const_value is None:
        return value is other
    return value is other or _same_constant(value.const_value, other.const_value)


def _same_constant(value: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    return (value.dtype, value.shape) == (other.dtype, other.shape) and value.tobytes() == other.tobytes()


class _Copied(NamedTuple):
    output: ir.Value
    caches: list[ir.Value]
    results: list[ir.Value]


def _repeat(
    graph: ir.Graph,
    model: PreTrainedModel,
    region: _Region,
    prefix: str,
    number: int,
    boundary: int,
    hidden: ir.Value,
    end: ir.Node,
) -> _Copied:
    """Insert the nodes of ``region`` before ``end`` as those of layer ``number``, which reads ``hidden`` at ``boundary``."""
    copies: dict[ir.Value, ir.Value] = {}

    def copy(value: ir.Value) -> ir.Value:
        copies[value] = ir.Value(name=f"{value.name}.layer_{boundary}", type=value.type, shape=value.shape)
        return copies[value]

    begin = ir.node(
        "Boundary", [hidden], {"index": boundary}, domain=region.begin.domain, outputs=[copy(region.begin.outputs[0])]
    )
    begin.version, begin.name = region.begin.version, f"{region.begin.name}.layer_{boundary}"
    nodes = [begin]
    caches = [copy(cache) for cache in region.caches]
    for node in region.nodes:
        for value in node.inputs:
            if value is not None and value not in copies and (value.name or "").startswith(f"{prefix}.{region.number}."):
                copies[value] = _parameter(graph, model, value, f"{prefix}.{region.number}.", f"{prefix}.{number}.")
        inputs = [copies.get(value, value) if value is not None else None for value in node.inputs]
        outputs = [copy(value) for value in node.outputs]
        nodes.append(
            ir.Node(
                node.domain,
                node.op_type,
                inputs,
                list(node.attributes.values()),
                overload=node.overload,
                outputs=outputs,
                version=node.version,
                name=f"{node.name}.layer_{boundary}",
            )
        )
    graph.insert_before(end, nodes)
    last = region.end.inputs[0]
    assert last is not None
    return _Copied(copies[last], caches, [copies[result] for result in region.results])


def _parameter(graph: ir.Graph, model: PreTrainedModel, like: ir.Value, old: str, new: str) -> ir.Value:
    """The initializer of another layer's parameter or buffer."""
    name = f"{new}{(like.name or '').removeprefix(old)}"
    if name in graph.initializers:  # of a loop before
        return graph.initializers[name]
    own = name.removeprefix("model.")
    owner, _, key = own.rpartition(".")
    module = model.get_submodule(owner)
    tensor = module._parameters.get(key)
    tensor = tensor if tensor is not None else module._buffers[key]
    assert tensor is not None
    value = ir.Value(name=name, type=like.type, shape=like.shape, const_value=TorchTensor(tensor.detach(), name=name))
    graph.register_initializer(value)
    return value
