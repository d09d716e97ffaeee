"""Products with the operators around them: a norm before, the addition of a residual or a gate after.

    normed, total = SkipNorm(x, product(a))         total, squares = product(a) + x
    gate, up      = product(normed)          →      opened         = silu(gate) · up of norm(total, squares)
    opened        = silu(gate) · up

A decoder layer of few tokens is then four products and attention. Steps of more tokens run the operators one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tide_runtime.backends.torch.graph_file import GraphFile, GraphNode
from tide_runtime.backends.torch.joined_nodes import GATE, LINEAR
from tide_runtime.backends.torch.low_bits import dequantised

FUSED = "fused product"  # x, residual, squares, gains and the matrix → products, squares; see `FusedProduct`
LOW_BITS = "com.microsoft::MatMulNBits"
_SKIP_NORM = "com.microsoft::SkipSimplifiedLayerNormalization"


class _Fused(NamedTuple):
    """The operators around one product, while a graph is rewritten."""

    product: GraphNode
    residual: str = ""
    total: str = ""  # the output with the residual, in place of the product's
    squares: str = ""  # of `total`, where a norm reads it
    norm: GraphNode | None = None  # whose output the product reads, in place of `total` of another
    gate: str = ""  # the output of the gate, in place of the product's two


def with_fused_products(nodes: Sequence[GraphNode], graph: GraphFile) -> list[GraphNode]:
    """The ``nodes`` with one `FUSED` for each product and what surrounds it. The others stay as they are."""
    uses = Counter([*graph.outputs, *(name for node in nodes for name in node.inputs if name)])
    makers = {name: node for node in nodes for name in node.outputs if name}
    parts = {node.outputs[0]: _Fused(node) for node in nodes if node.op in (LINEAR, LOW_BITS) and _rounds(node, graph)}
    gone = set[int]()
    for node in nodes:
        if node.op in (_SKIP_NORM, "Add") and (sides := _addition(node, parts, uses, graph)) is not None:
            product, residual = sides
            total = node.outputs[3] if node.op == _SKIP_NORM else node.outputs[0]
            readers = [other for other in nodes if node.outputs[0] in other.inputs]
            if node.op == _SKIP_NORM and not all(reader.outputs[0] in parts for reader in readers):
                continue
            squares = f"squares of {total}" if node.op == _SKIP_NORM else ""
            parts[product] = parts[product]._replace(residual=residual, total=total, squares=squares)
            for reader in readers if node.op == _SKIP_NORM else []:
                parts[reader.outputs[0]] = parts[reader.outputs[0]]._replace(norm=node)
            gone.add(id(node))
        if node.op == GATE and (found := _gated(node, parts, makers, uses)) is not None:
            source, between = found
            parts[source.outputs[0]] = parts[source.outputs[0]]._replace(gate=node.outputs[0])
            gone |= {id(node), *map(id, between)}
    return [_fused(parts[node.outputs[0]]) if node.outputs[0] in parts else node for node in nodes if id(node) not in gone]


def _rounds(node: GraphNode, graph: GraphFile) -> bool:
    """Whether the product is of 16 bits, which matrix instructions multiply."""
    operand = node.inputs[2 if node.op == LOW_BITS else 1]
    return operand in graph.weights and graph.weights[operand].dtype in (torch.float16, torch.bfloat16)


def _addition(node: GraphNode, parts: Mapping[str, _Fused], uses: Counter[str], graph: GraphFile) -> tuple[str, str] | None:
    """The product that ``node`` adds to something that is computed before it, and that."""
    for product, residual in (node.inputs[:2], node.inputs[1::-1]):
        if product not in parts or uses[product] != 1 or len(parts[product].product.outputs) != 1 or parts[product].total:
            continue
        if residual not in graph.weights and (node.op != _SKIP_NORM or (len(node.outputs) > 3 and node.outputs[3])):
            return product, residual
    return None


def _gated(
    node: GraphNode, parts: Mapping[str, _Fused], makers: Mapping[str, GraphNode], uses: Counter[str]
) -> tuple[GraphNode, list[GraphNode]] | None:
    """The product whose two outputs, or two halves, ``node`` takes as gate and what it opens; and the nodes between."""
    first, second = (makers.get(name) for name in node.inputs)
    if first is None or first is not second or any(uses[name] != 1 for name in node.inputs) or first.outputs != node.inputs:
        return None
    if first.op == "Split" and first.attributes.get("axis") == -1 and uses[first.inputs[0]] == 1:
        between = [first]
        first = makers.get(first.inputs[0])
    else:
        between = []
    return (first, between) if first is not None and first.outputs[0] in parts else None


def _fused(part: _Fused) -> GraphNode:
    node = part.product
    source = part.product.inputs[0]
    squares = ""
    gains = ""
    epsilon = 0.0
    if part.norm is not None:
        source = part.norm.outputs[3]
        gains = part.norm.inputs[2]
        epsilon = part.norm.attributes["epsilon"]
        squares = f"squares of {source}"
    outputs = (part.total or part.gate,) if part.total or part.gate else node.outputs
    attributes = {**node.attributes, "low_bits": node.op == LOW_BITS, "epsilon": epsilon, "gate": bool(part.gate)}
    return replace(
        node,
        op=FUSED,
        inputs=(source, part.residual, squares, gains, *node.inputs[1:]),
        outputs=(*outputs, part.squares) if part.squares else outputs,
        attributes=attributes,
    )


@dataclass(frozen=True)
class FusedProduct:
    """The function of a `FUSED` node.

    Args:
        matrix: `skinny_product.Matrix`.
        sizes: rows of the matrix that belong to each product of the input.
        gains: weight of the norm before, or None.
        takes: whether the kernel is for so many tokens a sequence, and so many in all.
        kernels: the module `fused_kernels`.
    """

    matrix: Any
    sizes: Sequence[int]
    gains: Tensor | None
    epsilon: float
    gate: bool
    takes: Callable[[int, int], bool]
    kernels: Any

    def __call__(self, x: Tensor, residual: Tensor | None = None, squares: Tensor | None = None) -> Any:
        rows = x.numel() // x.shape[-1]
        if not self.takes(x.shape[-2], rows) or (self.gains is not None and squares is None):
            return self._by_operators(x, residual)
        norm = None if self.gains is None or squares is None else self.kernels.Norm(self.gains, self.epsilon, squares)
        made, new_squares = self.kernels.skinny_product(x, self.matrix, norm, residual, self.gate)
        if residual is not None:
            return made, new_squares
        return made if self.gate or len(self.sizes) == 1 else made.split(self.sizes, -1)

    def _by_operators(self, x: Tensor, residual: Tensor | None) -> Any:
        if self.gains is not None:
            x = F.rms_norm(x.float(), x.shape[-1:], eps=self.epsilon).to(x.dtype) * self.gains
        made = F.linear(x, self._dense())
        if residual is not None:
            return residual + made, None
        if self.gate:
            return self.kernels.gated(*made.chunk(2, -1))
        return made if len(self.sizes) == 1 else made.split(self.sizes, -1)

    def _dense(self) -> Tensor:
        matrix = self.matrix
        if matrix.scales is None:
            return matrix.values
        return dequantised(matrix.values, matrix.scales, matrix.zeros, matrix.bits, matrix.block)
