"""A graph as a list of torch calls. Values live until their last use; constants are on the device before the first run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tide_runtime.backends.torch.attention import (
    CACHE_SCALES,
    ROTARY_TABLES,
    SINKS,
    Attention,
    Shared,
    cache_scales,
    rotation_table,
)
from tide_runtime.backends.torch.fused_product import FUSED, FusedProduct, with_fused_products
from tide_runtime.backends.torch.graph_file import DeviceWeights, GraphFile, GraphNode, Weight
from tide_runtime.backends.torch.joined_nodes import GATE, LINEAR, TOKEN, with_gates, with_linear, with_tokens
from tide_runtime.backends.torch.low_bits import LowBitExperts, LowBitProduct, look_up
from tide_runtime.backends.torch.operators import OPERATORS, Function
from tide_runtime.backends.torch.router import router
from tide_runtime.errors import BundleError

ATTENTION, PRODUCT, EXPERTS, LOOK_UP, SKIP_NORM = (
    f"com.microsoft::{name}"
    for name in ("GroupQueryAttention", "MatMulNBits", "QMoE", "GatherBlockQuantized", "SkipSimplifiedLayerNormalization")
)
ROUTER = "tide::TideExitRouter"
_MAX_ON_HOST = 64  # elements of an integer constant that may be a size or an axis
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


class TorchGraph:
    """The function of a graph: `run` takes tensors of its inputs by name and returns its outputs.

    ``kernels``: the module `fused_kernels`, or None.

    Raises BundleError when the graph has operators that `OPERATORS` lacks, or sizes that are known on the device only.
    """

    def __init__(self, name: str, graph: GraphFile, weights: DeviceWeights, kernels: Any = None) -> None:
        self.name = name
        self.graph = graph
        self._weights = weights
        self._kernels = kernels
        self._shared = Shared()
        self._index = {name: place for place, name in enumerate(graph.inputs)}  # not all are read
        self._constants: list[Tensor | None] = [None] * len(graph.inputs)
        self._lifted: dict[tuple[Any, ...], Tensor] = {}
        self._check_operators()
        self._on_host = {n for n, w in graph.weights.items() if _may_be_size(w)}
        nodes = with_tokens(with_gates(with_linear(graph), graph.outputs), graph.outputs)
        if kernels is not None:
            nodes = with_fused_products(nodes, graph)
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
        self._shared.tensors.clear()
        return {name: values[self._index[name]] for name in self.graph.outputs}  # type: ignore[misc]

    def _check_operators(self) -> None:
        known = {*OPERATORS, ATTENTION, PRODUCT, EXPERTS, LOOK_UP, ROUTER}
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
        on_host = node.op == "Shape" or all(not name or name in self._on_host for name in inputs)
        places, lifted = list[int](), list[int]()
        for i, name in enumerate(inputs):
            stays = on_host or i in host
            if (weight := self.graph.weights.get(name)) is not None:
                places.append(self._constant(name, weight, stays))
                continue
            if i in host and name and name not in self._on_host:
                raise BundleError(f"{self.name}: {node.op} {node.name} reads a size that is known on the device only")
            if name in self._on_host and not stays:
                lifted.append(i)
            places.append(self._place(name) if name else -1)
        if on_host:
            self._on_host |= {*node.outputs}
        outputs = tuple(self._place(name or f"unused of {node.outputs[0]}") for name in node.outputs)
        return _Call(function, tuple(places), outputs, tuple(lifted), ())

    def _constant(self, name: str, weight: Weight, stays: bool) -> int:
        """The place of a constant, which ``stays`` on the host or is on the device."""
        place = self._place(name if stays else f"{name} on the device")
        if self._constants[place] is None:
            self._constants[place] = weight.on_host() if stays else self._weights.get(weight)
        return place

    def _function(self, node: GraphNode) -> tuple[Function, frozenset[int], Sequence[str]]:
        """The function of ``node``, which of its operands are in host memory, and their names."""
        if node.op == ATTENTION:
            return self._attention(node)
        if node.op == PRODUCT:
            return LowBitProduct(node.attributes, self._kernels), frozenset(), node.inputs
        if node.op == EXPERTS:
            return LowBitExperts(node.attributes, self._kernels), frozenset(), node.inputs
        if node.op == LOOK_UP:
            return look_up(node.attributes, self._kernels), frozenset(), node.inputs
        if node.op == ROUTER:
            return router(node.attributes, self._weights.device), frozenset(), node.inputs
        if node.op == LINEAR:
            return self._linear(node)
        if node.op == FUSED:
            return self._fused(node)
        if node.op == TOKEN:
            return self._kernels.token if self._kernels is not None else _token, frozenset(), node.inputs
        if node.op == GATE:
            return self._kernels.gated if self._kernels is not None else _gated, frozenset(), node.inputs
        if node.op == SKIP_NORM and self._kernels is not None:
            return self._skip_norm(node), frozenset(), node.inputs
        operator = OPERATORS[node.op]
        return operator.make(node.attributes), operator.host, node.inputs

    def _skip_norm(self, node: GraphNode) -> Function:
        epsilon = node.attributes["epsilon"]
        kernels = self._kernels

        def norm(x: Tensor, skip: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
            normed, total = kernels.add_norm(x, skip, weight, epsilon)
            return normed, None, None, total

        return norm

    def _fused(self, node: GraphNode) -> tuple[Function, frozenset[int], Sequence[str]]:
        source, residual, squares, gains, *operands = node.inputs
        attributes = node.attributes
        matrix = self._kernels.Matrix
        weights = [self.graph.weights[name] for name in operands if name]
        if attributes["low_bits"]:
            values, scales, *zeros = (self._weights.get(weight).view(attributes["N"], -1) for weight in weights)
            made = matrix(values, scales, zeros[0] if zeros else None, attributes["bits"], attributes["block_size"])
            sizes = [attributes["N"]]
        else:
            rows, sizes = self._rows(weights, bool(attributes.get("transB")))
            made = matrix(rows)
        function = FusedProduct(
            made,
            sizes,
            self._weights.get(self.graph.weights[gains]) if gains else None,
            attributes["epsilon"],
            attributes["gate"],
            self._kernels.takes_logits if self._gives_logits(node) else self._kernels.takes,
            self._kernels,
        )
        return function, frozenset(), (source, residual, squares)

    def _gives_logits(self, node: GraphNode) -> bool:
        """Whether ``node`` computes the logits, of tokens that lie one after the other whatever sequences they are of."""
        casts = [other.inputs[0] for other in self.graph.nodes if other.op == "Cast" and "logits" in other.outputs]
        return not {"logits", *casts}.isdisjoint(node.outputs)

    def _rows(self, weights: Sequence[Weight], as_stored: bool) -> tuple[Tensor, list[int]]:
        """Constant matrices [K, N], held as one [N, K], which both kernels and cuBLAS read fastest for few rows, and each N.

        ``as_stored``: there is one, and it is [N, K].
        """
        if as_stored:
            return self._weights.get(weights[0]), [weights[0].shape[0]]
        made = self._weights.derived("rows", weights, lambda tensors: torch.cat([each.t() for each in tensors]).contiguous())
        return made, [weight.shape[1] for weight in weights]

    def _linear(self, node: GraphNode) -> tuple[Function, frozenset[int], Sequence[str]]:
        source, *names = node.inputs
        weight, sizes = self._rows([self.graph.weights[name] for name in names], bool(node.attributes.get("transB")))
        kernels = self._kernels

        def product(x: Tensor) -> Tensor | tuple[Tensor, ...]:
            few = kernels is not None and kernels.takes(x.shape[-2], x.numel() // x.shape[-1])
            made = kernels.product(x, weight) if kernels is not None and few else F.linear(x, weight)
            return made if len(sizes) == 1 else made.split(sizes, -1)

        return product, frozenset(), (source,)

    def _attention(self, node: GraphNode) -> tuple[Function, frozenset[int], Sequence[str]]:
        inputs = [*node.inputs, *[""] * (CACHE_SCALES[1] + 1 - len(node.inputs))]
        foreign = [i for i, name in enumerate(inputs) if name and i > ROTARY_TABLES[1] and i not in (SINKS, *CACHE_SCALES)]
        if foreign:
            raise BundleError(f"{self.name}: {node.op} {node.name} has operands {foreign}, which target torch does not read")
        attend = Attention(node.attributes, self._shared, self._kernels)
        tables = [self.graph.weights[inputs[i]] for i in ROTARY_TABLES if inputs[i]]
        table: Tensor | None = None
        if tables:
            interleaved = bool(node.attributes.get("rotary_interleaved", 0))
            table = self._weights.derived(
                ("rotation", interleaved), tables, lambda both: rotation_table(both[0], both[1], interleaved)
            )

        scales: Tensor | None = None
        if inputs[CACHE_SCALES[0]]:
            both = [self.graph.weights[inputs[i]] for i in CACHE_SCALES]
            scales = self._weights.derived("cache scales", both, lambda tensors: cache_scales(*tensors))

        def function(
            query: Tensor, key: Any, value: Any, keys: Tensor, values: Tensor, lengths: Tensor, total: Any, sinks: Any = None
        ) -> tuple[Tensor, ...]:
            return attend(query, key, value, keys, values, lengths, total, table, sinks, scales)

        return function, frozenset(), [*inputs[:7], *([inputs[SINKS]] if inputs[SINKS] else [])]

    def _with_last_uses(self, calls: Sequence[_Call]) -> list[_Call]:
        constants = {i for i, made in enumerate(self._constants) if made is not None}
        kept = constants | {self._place(name) for name in self.graph.outputs}
        seen = set(kept)
        marked = list[_Call]()
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
    return weight.dtype in _INTEGERS and weight.data.size // weight.dtype.itemsize <= _MAX_ON_HOST


def _token(logits: Tensor) -> Tensor:
    peak, token = logits.float().max(-1)
    return torch.where(peak.isfinite(), token, -1)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
