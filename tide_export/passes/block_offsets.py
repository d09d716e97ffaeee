"""Products with weights whose blocks have offsets: x · (W + C) = x · W + s · c, with the sums s of x over blocks.

Each column of C has one value in a block, so that c [K / block_size, N] has them all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from tide_export.passes.graph_walk import array_initializer, as_type_of, insert_before, new_value


@dataclass
class BlockOffsets:
    """``sums``: by source and block size; products of one graph share them."""

    graph: ir.Graph
    sums: dict[tuple[ir.Value, int], ir.Value] = field(default_factory=dict)

    def added(self, node: ir.Node, product: ir.Value, offsets: ir.Value) -> ir.Value:
        """The quantized product ``node`` whose part x · W is ``product``; ``offsets``: c."""
        source = node.inputs[0]
        output = node.outputs[0]
        made = [new_value(f"{output.name}.{part}", output, output.shape) for part in ("offsets", "sum")]
        part = ir.node("MatMul", [self._sums(node), as_type_of(self.graph, source, offsets)], outputs=made[:1])
        insert_before(self.graph, node, part, ir.node("Add", [product, made[0]], outputs=made[1:]))
        return made[1]

    def _sums(self, node: ir.Node) -> ir.Value:
        """[…, K / block_size] of the source […, K]."""
        source, (columns, size) = node.inputs[0], (node.attributes[name].value for name in ("K", "block_size"))
        if (source, size) not in self.sums:
            *outer, _ = source.shape
            shape = [*outer, columns // size]
            target = np.array([0] * len(outer) + [shape[-1], size])
            split = array_initializer(self.graph, "blocks." + "x".join(map(str, target)), target)
            in_blocks = new_value(f"{source.name}.in_blocks_of_{size}", source, ir.Shape([*shape, size]))
            sums = self.sums[source, size] = new_value(f"{source.name}.sums_of_{size}", source, ir.Shape(shape))
            reshape = ir.node("Reshape", [source, split], outputs=[in_blocks])
            last = array_initializer(self.graph, "block_axis", np.array([-1]))
            insert_before(self.graph, node, reshape, ir.node("ReduceSum", [in_blocks, last], {"keepdims": 0}, outputs=[sums]))
        return self.sums[source, size]
