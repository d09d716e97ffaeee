"""The graph of a target's low-bit products: one of each kind, with the model's own weights, that ONNX Runtime runs."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tide_runtime.machine_cache import CachedFiles

from tide_export.graphs.cut import CutGraph, LoweredModel
from tide_export.progress import ExportProgress
from tide_export.targets import find_target
from tide_export.targets.base import BuildJob

K = 64
# Name, N, bits, zero points, bias, how often the graph has it. 1152 = 512 + 5 · 128 is cut to 512, 1500 to 604.
PRODUCTS = [
    ("narrow", 40, 4, True, False, 3),
    ("wide", 1152, 4, False, False, 1),
    ("head", 1500, 8, True, True, 1),
]


def product(name: str, n: int, bits: int, zeros: bool, bias: bool) -> tuple[Any, list[TensorProto]]:
    random, blocks = np.random.default_rng(n), K // 32
    parts = {
        "values": random.integers(0, 256, (n, blocks, 4 * bits), np.uint8),
        "scales": random.uniform(0.001, 0.01, (n, blocks)).astype(np.float32),
        "zeros": random.integers(0, 256, (n, blocks * bits // 8), np.uint8) if zeros else None,
        "order": None,
        "bias": random.standard_normal(n).astype(np.float32) if bias else None,
    }
    weights = [numpy_helper.from_array(array, f"{name}.{part}") for part, array in parts.items() if array is not None]
    inputs = ["x", *("" if array is None else f"{name}.{part}" for part, array in parts.items())]
    sizes = dict(K=K, N=n, bits=bits, block_size=32, accuracy_level=4)
    return helper.make_node("MatMulNBits", inputs, [name], domain="com.microsoft", **sizes), weights


def segment() -> ir.Model:
    """All `PRODUCTS` of one input, and a product in full precision."""
    dense = numpy_helper.from_array(np.random.default_rng(0).standard_normal((K, 8)).astype(np.float32), "dense.weight")
    nodes, weights, names = [helper.make_node("MatMul", ["x", "dense.weight"], ["dense"])], [dense], ["dense"]
    for name, *facts, count in PRODUCTS:
        for place in range(count):
            node, parts = product(f"{name}{place}", *facts)
            nodes.append(node)
            weights += parts
            names.append(f"{name}{place}")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", K])]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
    graph = helper.make_graph(nodes, "segment_0", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def build(model: ir.Model, directory: Path) -> str | None:
    """Build the target ``cpu`` with ``model`` as its only graph; the file of its products."""
    (directory / "work").mkdir(parents=True)
    job = BuildJob(directory, directory / "work", "fp32", [], ExportProgress(), CachedFiles(directory))
    target = find_target("cpu", "fp32")
    info = target.builder.build(target, LoweredModel([CutGraph("segment_0", model)], [], []), job)
    job.close()
    return info.products


def test_one_product_of_each_kind_with_the_models_weights(tmp_path: Path) -> None:
    """The check at load would measure other kernels than the model uses, or the bundle would hold its weights twice."""
    file = build(segment(), tmp_path)
    assert file == "onnx/cpu.products.onnx"
    products = ort.InferenceSession(str(tmp_path / file), providers=["CPUExecutionProvider"])
    model = ort.InferenceSession(str(tmp_path / "onnx/cpu.segment_0.onnx"), providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(2).standard_normal((5, K)).astype(np.float32)
    found, expected = products.run(None, {f"x_{K}": rows}), model.run(["narrow0", "wide0", "head0"], {"x": rows})
    assert [output.shape[1] for output in found] == [40, 512, 604]
    for output, whole in zip(found, expected, strict=True):
        assert np.array_equal(output, whole[:, : output.shape[1]])
    bytes_of_weights = sum(v.const_value.nbytes for v in segment().graph.initializers.values() if v.const_value is not None)
    assert (tmp_path / "onnx/weights.bin").stat().st_size < bytes_of_weights + 4096 * len(segment().graph.initializers)
    assert (tmp_path / file).stat().st_size < 8192


def test_a_target_without_low_bit_products_has_none(tmp_path: Path) -> None:
    """Bundles in full precision would be checked, and `exact` would be held back on them."""
    model = segment()
    for node in [node for node in model.graph if node.op_type == "MatMulNBits"]:
        for output in node.outputs:
            model.graph.outputs.remove(output)
        model.graph.remove(node, safe=True)
    assert build(model, tmp_path) is None
    assert not (tmp_path / "onnx/cpu.products.onnx").exists()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_shared_with_the_embedding(tmp_path: Path, bits: int) -> None:
    """The head of a tied model reshapes the embedding's weight; its product would go unmeasured."""
    node, weights = product("head", 700, bits, False, False)
    values = numpy_helper.to_array(weights[0])
    weights[0] = numpy_helper.from_array(values.reshape(700, -1), "embedding")
    weights.append(numpy_helper.from_array(np.array(values.shape), "shape"))
    reshape = helper.make_node("Reshape", ["embedding", "shape"], ["head.values"])
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", K])]
    outputs = [helper.make_tensor_value_info("head", TensorProto.FLOAT, ["tokens", 700])]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([reshape, node], "segment_0", inputs, outputs, weights)
    file = build(ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10)), tmp_path)
    rows = np.ones((2, K), np.float32)
    found = ort.InferenceSession(str(tmp_path / str(file))).run(None, {f"x_{K}": rows})[0]
    whole = ort.InferenceSession(str(tmp_path / "onnx/cpu.segment_0.onnx")).run(None, {"x": rows})[0]
    assert np.array_equal(found, whole[:, : found.shape[1]]) and found.shape[1] == 512 + 700 % 128
