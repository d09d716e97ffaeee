"""Which modules the products of a graph compute, as their values' names tell (tide_export's pass name_products)."""

from __future__ import annotations

import re
from typing import NamedTuple

from tide_runtime.backends.onnxruntime.model_proto import GraphNode, graph_nodes

_MODULE = re.compile(r"([^+\[\]]+)\[(\d+),(\d+)\]")
_LOW_BITS, _INTEGERS = "MatMulNBits", "MatMulIntegerToFloat"


class ModuleShape(NamedTuple):
    """A linear module: its path in the model, and the shape [N, K] of its weight."""

    name: str
    outputs: int
    inputs: int

    def __str__(self) -> str:
        return f"{self.name}[{self.outputs},{self.inputs}]"


class Product(NamedTuple):
    """A value that is one module's output or several modules' of the same input, side by side.

    Args:
        value, source: names of the output [1, T, N] and the input [1, T, K] in the graph.
        low_bits: whether the weight has few bits.
        integers: whether both factors are integers; ``source`` is then the input as it is rounded: divided by its smoothing
            scales.
    """

    value: str
    source: str
    modules: tuple[ModuleShape, ...]
    low_bits: bool
    integers: bool

    @property
    def width(self) -> int:
        """N."""
        return sum(module.outputs for module in self.modules)


def products(model: bytes) -> list[Product]:
    """Those products of a graph that are named after modules; none: it was exported by a version that did not name them."""
    made_by = {output: node for node in graph_nodes(model) for output in node.outputs}
    found = []
    for value, node in made_by.items():
        parts = value.split("+")
        modules = [match for part in parts if (match := _MODULE.fullmatch(part))]
        if len(modules) == len(parts):
            product = _product(node, made_by)
            shapes = tuple(ModuleShape(name, int(rows), int(columns)) for name, rows, columns in (m.groups() for m in modules))
            source = _rounded(product, made_by) if product.operator == _INTEGERS else product.inputs[0]
            found.append(Product(value, source, shapes, product.operator == _LOW_BITS, product.operator == _INTEGERS))
    return found


def _product(node: GraphNode, made_by: dict[str, GraphNode]) -> GraphNode:
    """The product itself: a sum adds the part of its weight's offsets (tide_export's pass quantized_matmul), a factor is the
    largest magnitude of a row of integers (integer_products)."""
    return made_by[node.inputs[0]] if node.operator in ("Add", "Mul") else node


def _rounded(product: GraphNode, made_by: dict[str, GraphNode]) -> str:
    """The value whose rows an integer ``product`` reads: each is divided by its largest magnitude, and quantised."""
    quantize = made_by[product.inputs[0]]
    return made_by[quantize.inputs[0]].inputs[0]
