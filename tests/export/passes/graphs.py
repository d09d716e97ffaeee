"""Small graphs for the tests of passes: parsed from ONNX's text format, lowered by one pass, run in ONNX Runtime unoptimized."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import helper, numpy_helper
from onnx_ir.tape import Tape

from tide_export.passes.base import GraphPass, LoweringContext, PassReport
from tide_export.quantize.kv_scales import KVScales

SLOTS = 24  # of the KV caches; ``max_seq_len`` of the passes
_HEADER = '<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1, "tide": 1]>\nsmall '


def parse(text: str, opset: int = 24, seed: int = 0, **weights: np.ndarray) -> ir.Model:
    """The graph ``(inputs) => (outputs) <constants, weights, shapes> { nodes }``, with the other shapes inferred.

    Args:
        text: https://github.com/onnx/onnx/blob/main/docs/Syntax.md; a value declared in ``<…>`` without producer is a weight.
        weights: values of weights; those not given are standard normal.
    """
    proto = onnx.parser.parse_model(_HEADER.format(opset=opset) + text)
    made = {name for node in proto.graph.node for name in node.output}
    declared, random = list(proto.graph.value_info), np.random.default_rng(seed)
    del proto.graph.value_info[:]
    for value in declared:
        if value.name in made:
            proto.graph.value_info.append(value)
            continue
        tensor = value.type.tensor_type
        shape = [dim.dim_value for dim in tensor.shape.dim]
        array = weights.get(value.name, random.normal(size=shape))
        assert list(array.shape) == shape, f"{value.name} is declared {shape}, given {list(array.shape)}"
        array = array.astype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        proto.graph.initializer.append(numpy_helper.from_array(array, value.name))
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))


def lowered(
    graph_pass: GraphPass, model: ir.Model, max_seq_len: int = SLOTS, kv_scales: Sequence[KVScales] = ()
) -> tuple[ir.Model, PassReport]:
    """A copy of ``model`` after the pass, and the pass's report."""
    copy = model.clone()
    report = graph_pass(copy, LoweringContext(max_seq_len, kv_scales=kv_scales))
    return copy, report


def assert_untouched(graph_pass: GraphPass, model: ir.Model, *reasons: str) -> None:
    """Assert that the pass applies nowhere, changes no node, and reports ``reasons``."""
    after, report = lowered(graph_pass, model)
    assert report.applied == 0
    assert [skipped.split(": ", 1)[1] for skipped in report.skipped] == list(reasons)
    nodes = [[(n.op_identifier(), [v and v.name for v in n.inputs]) for n in m.graph] for m in (model, after)]
    assert nodes[0] == nodes[1]
    assert [v.name for v in after.graph.inputs] == [v.name for v in model.graph.inputs]


def finish(model: ir.Model, tape: Tape, value: ir.Value) -> ir.Model:
    """``model`` with the nodes on ``tape``, ``value`` in place of its only output."""
    declared = model.graph.outputs[0]
    value.name, value.type, value.shape = declared.name, declared.type, declared.shape
    model.graph.extend(tape.nodes)
    model.graph.outputs[0] = value
    return model


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def only(model: ir.Model, operator: str) -> ir.Node:
    """The graph's one node of this type."""
    (node,) = (node for node in model.graph if node.op_type == operator)
    return node


def random_feeds(model: ir.Model, sizes: dict[str, int], seed: int = 1) -> dict[str, np.ndarray]:
    """Standard normal numbers for each input of floats, its symbolic dimensions as in ``sizes``."""
    random, feeds = np.random.default_rng(seed), {}
    for value in model.graph.inputs:
        if value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            shape = [sizes.get(str(dim), dim) for dim in value.shape]
            feeds[value.name] = random.normal(size=shape).astype(value.dtype.numpy())
    return feeds


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Output name → array. ONNX Runtime's own fusions are off, so that a pass is compared with the nodes that it replaces."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)  # ONNX Runtime sorts nodes by itself; other readers want them in order
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}
    return dict(zip(names, session.run(names, {n: a for n, a in feeds.items() if n in wanted}), strict=True))


def assert_same_results(before: ir.Model, after: ir.Model, feeds: dict[str, np.ndarray], tolerance: float = 0.0) -> None:
    """Assert equal output names, types, shapes and values: bitwise, or within ``tolerance`` of an output's largest value."""
    expected, found = run(before, feeds), run(after, feeds)
    assert list(found) == list(expected)
    for name, array in found.items():
        assert array.dtype == expected[name].dtype and array.shape == expected[name].shape
        scale = max(1.0, float(np.abs(expected[name]).max()))
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=tolerance * scale, err_msg=name)
