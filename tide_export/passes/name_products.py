"""Name products after the modules that they compute, so that the runtime finds where the matrices of a LoRA adapter belong.

A product's value is called ``MODULE[N,K]``: the module's path in the model and the shape of its weight. `pack_projections` joins
names with ``+`` where it joins products. The first pass: later ones take the names from parameters.
"""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
from tide_runtime.backends.onnxruntime.products import ModuleShape

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import is_weight, produced_by


def name_products(model: ir.Model, context: LoweringContext) -> PassReport:
    """Rename the values of products with one module's weight [N, K]."""
    report = PassReport("name_products")
    products = [(node, module) for node in model.graph if node.op_type == "MatMul" and (module := _module(node)) is not None]
    uses = Counter(module.name for _, module in products)
    for node, module in products:
        output = node.outputs[0]
        if output.is_graph_output():
            report.skip(output.name, "is a graph output")
        elif uses[module.name] > 1:
            report.skip(output.name, "several products have its weight, as in looped models")
        else:
            output.name = str(module)
            report.applied += 1
    return report


def _module(product: ir.Node) -> ModuleShape | None:
    """The module whose weight the product reads: ``model.`` before its name is the trace's."""
    factor = product.inputs[1]
    transpose = produced_by(factor, "Transpose")
    weight = transpose.inputs[0] if transpose is not None else factor
    name = (weight.name or "").removeprefix("model.") if is_weight(weight) else ""
    if weight is None or weight.shape is None or len(weight.shape) != 2 or not name.endswith(".weight"):
        return None
    rows, columns = (int(size) for size in weight.shape)
    shape = (rows, columns) if transpose is not None else (columns, rows)  # GPT-2 stores weights transposed
    return ModuleShape(name.removesuffix(".weight"), *shape)
