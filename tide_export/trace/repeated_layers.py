"""Trace two layers of each kind and repeat their nodes for the others, as tracing a layer costs a second.

Layers are of one *kind* if they have the same modules with the same attributes and shapes. The nodes of a kind are taken from the
second layer that was traced, and only if those of the first are the same: code that reads its layer's number would differ. Code
that treats every fourth layer in another way without an attribute that says so would not, so layers are repeated only where
verification then compares each segment with the unmodified model.
"""

from __future__ import annotations

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


def traced_layers(model: PreTrainedModel, layers: nn.ModuleList, kept: Sequence[LayerInfo]) -> list[int]:
    """The layers to trace: the first two of each kind, or all where that saves little or layers read what others keep.

    In a looped model the first one aside, which begins with what ends a loop.
    """
    kinds = layer_kinds(model, layers)
    aside = int(len(kept) > len(kinds))
    of_kind = ([i for i, other in enumerate(kinds) if other == kind and i >= aside][:2] for kind in set(kinds))
    chosen = sorted({*range(aside), *(number for numbers in of_kind for number in numbers)})
    per_layer_inputs = getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0)  # one table has those of all
    if per_layer_inputs or len(chosen) > len(kinds) - 2 or any(layer.kv_source is not None for layer in kept):
        return [*range(len(kinds))]
    return chosen


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


def of_layers(kept: Sequence[LayerInfo], layers: int, numbers: Sequence[int]) -> tuple[LayerInfo, ...]:
    """What those of ``layers`` layers with the ``numbers`` keep, in each loop."""
    return tuple(one for call, one in enumerate(kept) if call % layers in numbers)


@contextmanager
def only_layers(model: PreTrainedModel, layers: nn.ModuleList, numbers: Sequence[int]) -> Iterator[nn.ModuleList]:
    """Context in which ``model`` has only the layers ``numbers``, which are numbered from 0 on."""
    if len(numbers) == len(layers):
        yield layers
        return
    owner = next(module for module in model.modules() if any(child is layers for child in module.children()))
    name = next(name for name, child in owner.named_children() if child is layers)
    config = model.config.get_text_config()
    chosen = nn.ModuleList(layers[number] for number in numbers)
    settings = vars(config)
    by_layer = {key: one for key, one in settings.items() if isinstance(one, (list, tuple)) and len(one) == len(layers)}
    numbered = [(module, place) for place, layer in enumerate(chosen) for module in layer.modules() if _NUMBER in vars(module)]
    before = [vars(module)[_NUMBER] for module, _ in numbered]
    count = config.num_hidden_layers
    setattr(owner, name, chosen)
    config.num_hidden_layers = len(numbers)
    settings |= {key: type(one)(one[number] for number in numbers) for key, one in by_layer.items()}
    for module, place in numbered:
        setattr(module, _NUMBER, place)
    try:
        yield chosen
    finally:
        setattr(owner, name, layers)
        settings |= by_layer
        config.num_hidden_layers = count
        for (module, _), number in zip(numbered, before, strict=True):
            setattr(module, _NUMBER, number)


def repeat_layers(
    traced: ir.Model, model: PreTrainedModel, layers: nn.ModuleList, kept: Sequence[LayerInfo], numbers: Sequence[int]
) -> bool:
    """Add the other layers to each loop of a trace of the layers ``numbers``, in place; False where the nodes of a kind differ.

    Inputs of ``traced``: three, and what each layer keeps; outputs: logits, and the same.

    Args:
        kept: by all layers, in each loop.
    """
    graph = traced.graph
    kinds = layer_kinds(model, layers)
    prefix = next(f"model.{name}" for name, module in model.named_modules() if module is layers)
    _rename_parameters(graph, prefix, numbers)
    regions = _regions(graph, of_layers(kept, len(layers), numbers), numbers)
    loops = [regions[first : first + len(numbers)] for first in range(0, len(regions), len(numbers))]
    sources: dict[tuple[int, Hashable], _Region] = {}
    untraced = [kinds[number] for number in range(len(layers)) if number not in numbers]
    for (loop, own), kind in product(enumerate(loops), dict.fromkeys(untraced)):
        before, last = [region for region in own if kinds[region.number] == kind][-2:]
        if not last.is_closed(graph) or not _same(last, before, prefix):
            return False
        sources[loop, kind] = last
    caches, results = list[ir.Value](), list[ir.Value]()
    for loop, own in enumerate(loops):
        by_number = {region.number: region for region in own}
        begins = [*((region.number, region.begin) for region in own), (len(layers), own[-1].end)]
        hidden: ir.Value | None = None
        for number in range(len(layers)):
            boundary = loop * len(layers) + number
            if region := by_number.get(number):
                if hidden is not None:
                    region.begin.replace_input_with(0, hidden)
                region.begin.attributes["index"] = ir.AttrInt64("index", boundary)
                hidden = region.output
                caches += region.caches
                results += region.results
                continue
            assert hidden is not None
            following = next(node for other, node in begins if other > number)
            copied = _repeat(graph, model, sources[loop, kinds[number]], prefix, number, boundary, hidden, following)
            hidden = copied.output
            caches += copied.caches
            results += copied.results
        assert hidden is not None
        own[-1].end.replace_input_with(0, hidden)
        own[-1].end.attributes["index"] = ir.AttrInt64("index", (loop + 1) * len(layers))
    graph.inputs[_FIRST_CACHE:] = caches
    graph.outputs[_FIRST_OUTPUT:] = results
    return True


def _rename_parameters(graph: ir.Graph, prefix: str, numbers: Sequence[int]) -> None:
    """The trace names the layers 0, 1, … that are ``numbers`` of the model."""
    values = [graph.initializers.pop(name) for name in [*graph.initializers]]
    for value in values:
        name = value.name or ""
        if name.startswith(f"{prefix}."):
            place, _, rest = name.removeprefix(f"{prefix}.").partition(".")
            value.name = f"{prefix}.{numbers[int(place)]}.{rest}"
        graph.register_initializer(value)


@dataclass(frozen=True)
class _Region:
    """The ``nodes`` of layer ``number`` in one loop, from after the boundary node ``begin`` to the boundary node ``end``, which
    reads ``output``.

    ``caches``, ``results``: inputs and outputs of the graph for what the layer keeps.
    """

    number: int
    begin: ir.Node
    nodes: list[ir.Node]
    end: ir.Node
    output: ir.Value | None
    caches: tuple[ir.Value, ...]
    results: tuple[ir.Value, ...]

    def is_closed(self, graph: ir.Graph) -> bool:
        """Whether nothing else reads what the layer makes, but for its output and caches."""
        inside = {*self.nodes, self.end}
        made = [value for node in self.nodes for value in node.outputs]
        outer = {value for value in made if value.is_graph_output()}
        return outer == set(self.results) and all(node in inside for value in made for node, _ in value.uses())


def _regions(graph: ir.Graph, kept: Sequence[LayerInfo], numbers: Sequence[int]) -> list[_Region]:
    """Those of all calls of the layers ``numbers``."""
    nodes = list(graph)
    places = {}
    counts = [2 * layer.attends + len(layer.states) for layer in kept]
    begins = [0, *accumulate(counts)]
    for place, node in enumerate(nodes):
        if node.op_type == "Boundary":
            places[int(node.attributes["index"].value)] = place
    return [
        _Region(
            numbers[call % len(numbers)],
            nodes[places[call]],
            nodes[places[call] + 1 : places[call + 1]],
            nodes[places[call + 1]],
            nodes[places[call + 1]].inputs[0],
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
    ends = ((region.output, other.output), *zip(region.results, other.results, strict=True))
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
    following: ir.Node,
) -> _Copied:
    """Insert the nodes of ``region`` before ``following``, as those of layer ``number``, which reads ``hidden``."""
    copies: dict[ir.Value, ir.Value] = {}

    def copy(value: ir.Value) -> ir.Value:
        copies[value] = ir.Value(name=f"{value.name}.layer_{boundary}", type=value.type, shape=value.shape)
        return copies[value]

    begin = ir.node(
        "Boundary", [hidden], {"index": boundary}, domain=region.begin.domain, outputs=[copy(region.begin.outputs[0])]
    )
    begin.version = region.begin.version
    begin.name = f"{region.begin.name}.layer_{boundary}"
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
    graph.insert_before(following, nodes)
    assert region.output is not None
    return _Copied(copies[region.output], caches, [copies[result] for result in region.results])


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
