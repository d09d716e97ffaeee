"""A graph as a list of torch calls. Values live until their last use; constants are on the device before the first run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tide_runtime.backends.torch.attention import ROTARY_TABLES, SINKS, Attention, Shared, rotation_table
from tide_runtime.backends.torch.graph_file import DeviceWeights, GraphFile, GraphNode, Weight
from tide_runtime.backends.torch.low_bits import LowBitProduct, look_up
from tide_runtime.backends.torch.operators import OPERATORS, Function
from tide_runtime.errors import BundleError

ATTENTION, PRODUCT, LOOK_UP = (
    f"com.microsoft::{name}" for name in ("GroupQueryAttention", "MatMulNBits", "GatherBlockQuantized")
)
_MOST_ON_HOST = 64  # elements of an integer constant that may be a size or an axis
_INTEGERS = (torch.int64, torch.int32, torch.bool)


@dataclass(frozen=True)
class _Call:
    """``function`` of the values at ``inputs`` (-1: left out) gives those at ``outputs``; ``last``: which nothing reads later.

    ``lifted``: operands that are computed on the host, where the others are not.
    """

    function: Function
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    lifted: tuple[int, ...]
    last: tuple[int, ...]


class Program:
    """The function of a graph: `run` takes tensors of its inputs by name and returns its outputs.

    Raises BundleError when the graph has operators that `OPERATORS` lacks, or sizes that are known on the device only.
    """

    def __init__(self, name: str, graph: GraphFile, weights: DeviceWeights) -> None:
        self.name, self.graph, self._weights = name, graph, weights
        self._shared = Shared()
        self._index: dict[str, int] = {}
        self._constants: list[Tensor | None] = []
        self._lifted: dict[tuple[Any, ...], Tensor] = {}
        self._check_operators()
        self._on_host = {n for n, w in graph.weights.items() if _may_be_size(w)}
        nodes = _with_silu(graph.nodes)
        calls = [self._call(node) for node in nodes]
        self._calls = self._with_last_uses(calls)

    def run(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = list(self._constants)
        for name, tensor in given.items():
            values[self._place(name)] = tensor
        for call in self._calls:
            operands = [values[i] if i >= 0 else None for i in call.inputs]
            for i in call.lifted:
                operands[i] = self._lift(operands[i])
            made = call.function(*operands)
            for place, tensor in zip(call.outputs, made if isinstance(made, tuple | list) else (made,), strict=False):
                values[place] = tensor
            for place in call.last:
                values[place] = None
        self._shared.made.clear()
        return {name: values[self._index[name]] for name in self.graph.outputs}  # type: ignore[misc]

    def _check_operators(self) -> None:
        known = {*OPERATORS, ATTENTION, PRODUCT, LOOK_UP}
        unknown = Counter(node.op for node in self.graph.nodes if node.op not in known)
        if unknown:
            raise BundleError(
                f"{self.name} has operators that target torch does not run: {', '.join(sorted(unknown))}; "
                "export it for target cpu, or upgrade tide-llm"
            )

    def _place(self, name: str) -> int:
        if name not in self._index:
            self._index[name] = len(self._constants)
            self._constants.append(None)
        return self._index[name]

    def _call(self, node: GraphNode) -> _Call:
        function, host, inputs = self._function(node)
        lifted = list[int]()
        if node.op == "Shape" or (host is not None and all(not name or name in self._on_host for name in inputs)):
            self._on_host |= {*node.outputs}
        elif host is not None:
            for i, name in enumerate(inputs):
                if name and i in host and name not in self._on_host:
                    raise BundleError(f"{self.name}: {node.op} {node.name} reads a size that is known on the device only")
                if name in self._on_host and i not in host:
                    lifted.append(i)
        places = [self._place(name) if name else -1 for name in inputs]
        for i, name in enumerate(inputs):
            if (weight := self.graph.weights.get(name)) is None:
                continue
            stays = name in self._on_host and i not in lifted
            places[i] = self._place(name if stays else f"{name} on the device")
            if self._constants[places[i]] is None:
                self._constants[places[i]] = weight.on_host() if stays else self._weights.get(weight)
        outputs = tuple(self._place(name or f"unused of {node.outputs[0]}") for name in node.outputs)
        computed = tuple(i for i in lifted if inputs[i] not in self.graph.weights)
        return _Call(function, tuple(places), outputs, computed, ())

    def _function(self, node: GraphNode) -> tuple[Function, frozenset[int] | None, Sequence[str]]:
        """The function of ``node``, its operands in host memory (None: of no interest), and the names of its operands."""
        if node.op == ATTENTION:
            return self._attention(node)
        if node.op in (PRODUCT, LOOK_UP):
            made = LowBitProduct(node.attributes) if node.op == PRODUCT else look_up(node.attributes)
            return made, frozenset(), node.inputs
        if node.op == _SILU:
            return F.silu, frozenset(), node.inputs
        if node.op == "MatMul" and self._is_matrix(node.inputs[1]):
            return self._linear(node)
        operator = OPERATORS[node.op]
        return operator.make(node.attributes), operator.host, node.inputs

    def _is_matrix(self, name: str) -> bool:
        weight = self.graph.weights.get(name)
        return weight is not None and len(weight.shape) == 2

    def _linear(self, node: GraphNode) -> tuple[Function, frozenset[int], Sequence[str]]:
        """A product with a constant matrix [K, N], held as [N, K] on a GPU: cuBLAS's kernels for few rows read it fastest."""
        source, name = node.inputs
        if self._weights.device.type == "cpu":
            return torch.matmul, frozenset(), node.inputs
        weight = self._weights.made("transposed", [self.graph.weights[name]], lambda tensors: tensors[0].t().contiguous())
        return lambda x: F.linear(x, weight), frozenset(), (source,)

    def _attention(self, node: GraphNode) -> tuple[Function, frozenset[int], Sequence[str]]:
        given = [*node.inputs, *[""] * (SINKS + 1 - len(node.inputs))]
        foreign = [i for i, name in enumerate(given) if name and i > ROTARY_TABLES[1] and i != SINKS]
        if foreign:
            raise BundleError(f"{self.name}: {node.op} {node.name} has operands {foreign}, which target torch does not read")
        attend = Attention(node.attributes, self._shared)
        tables = [self.graph.weights[given[i]] for i in ROTARY_TABLES if given[i]]
        table: Tensor | None = None
        if tables:
            interleaved = bool(node.attributes.get("rotary_interleaved", 0))
            table = self._weights.made(("rotation", interleaved), tables, lambda both: rotation_table(*both, interleaved))

        def function(*operands: Any) -> tuple[Tensor, ...]:
            return attend(*operands[:7], table, operands[7] if len(operands) > 7 else None)

        return function, frozenset(), [*given[:7], *([given[SINKS]] if given[SINKS] else [])]

    def _with_last_uses(self, calls: Sequence[_Call]) -> list[_Call]:
        constants = {i for i, made in enumerate(self._constants) if made is not None}
        kept = constants | {self._place(name) for name in self.graph.outputs}
        seen, marked = set(kept), list[_Call]()
        for call in reversed(calls):
            last = {i for i in (*call.inputs, *call.outputs) if i >= 0} - seen
            seen |= last
            marked.append(_Call(call.function, call.inputs, call.outputs, call.lifted, tuple(last)))
        return marked[::-1]

    def _lift(self, tensor: Tensor | None) -> Tensor | None:
        """A small tensor of the host on the device. The runs before a capture have uploaded all that it needs."""
        if tensor is None or self._weights.device.type == "cpu":
            return tensor
        key = (tensor.dtype, tuple(tensor.shape), tuple(tensor.reshape(-1).tolist()))
        if key not in self._lifted:
            self._lifted[key] = tensor.to(self._weights.device)
        return self._lifted[key]


def _may_be_size(weight: Weight) -> bool:
    return weight.dtype in _INTEGERS and weight.data.size // weight.dtype.itemsize <= _MOST_ON_HOST


_SILU = "silu"


def _with_silu(nodes: Sequence[GraphNode]) -> list[GraphNode]:
    """x · sigmoid(x) as one call."""
    uses = Counter(value for node in nodes for value in node.inputs)
    sigmoids = {node.outputs[0]: node for node in nodes if node.op == "Sigmoid"}
    made, gone = list[GraphNode](), set[str]()
    for node in nodes:
        gate = next((sigmoids[name] for name in node.inputs if name in sigmoids), None) if node.op == "Mul" else None
        if gate is not None and {*node.inputs} == {gate.inputs[0], gate.outputs[0]} and uses[gate.outputs[0]] == 1:
            gone.add(gate.outputs[0])
            node = GraphNode(_SILU, node.name, gate.inputs, node.outputs, {})
        made.append(node)
    return [node for node in made if node.outputs[0] not in gone]
