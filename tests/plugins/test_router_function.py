"""The router in an exported exit: one ONNX function, and the kernels' reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from export.stub_calibration import exit_tensors
from tide_plugins.reference import exit_router
from tide_runtime.bundle.calibration import ExitInfo

from tide_export.graphs.exit_graphs import exit_graph_model
from tide_export.graphs.router_function import DOMAIN, NAME, router_function

HIDDEN = 72
BOTH = ExitInfo(3, "tail:2", "mlp+max_probability", 0.5, mlp_threshold=0.5)
SCORE = ExitInfo(3, "identity", "mlp", 0.5)
# float32 against float64 of the same inputs.
TOLERANCE = 2e-6


def session(model: onnx.ModelProto, optimised: Path | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3  # writing an optimised graph warns that it is for this machine
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def call(dtype: ir.DataType, width: int) -> onnx.ModelProto:
    """A model of one node that calls the function, everything an input."""
    f32 = ir.DataType.FLOAT
    types = {"hidden": (dtype, ("batch", "seq", HIDDEN)), "down": (ir.DataType.FLOAT, (width, HIDDEN))}
    types |= {"down_bias": (f32, (width,)), "up": (f32, (width,)), "up_bias": (f32, (1,))}
    inputs = [ir.val(name, dtype=kind, shape=shape) for name, (kind, shape) in types.items()]
    attributes = [ir.Attr("epsilon", ir.AttributeType.FLOAT, 1e-3)]
    node = ir.Node(DOMAIN, NAME, inputs, attributes, outputs=[ir.val("score", dtype=f32, shape=("batch", "seq"))])
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 24, DOMAIN: 1}, name="call")
    return ir.to_proto(ir.Model(graph, ir_version=10, functions=[router_function()]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("width", [1, 5, 128])
def test_the_function_is_what_the_kernels_compute(dtype, width):
    """Guards against exits that differ between the CPU and TensorRT."""
    random = np.random.default_rng(width)
    hidden, down = random.normal(size=(3, 4, HIDDEN)).astype(dtype), random.normal(size=(width, HIDDEN)).astype(np.float32)
    down_bias, up, up_bias = (random.normal(size=size).astype(np.float32) for size in (width, width, 1))
    weights = {"down": down, "down_bias": down_bias, "up": up, "up_bias": up_bias}
    model = call(ir.DataType.from_numpy(np.dtype(dtype)), width)
    (score,) = session(model).run(["score"], {"hidden": hidden, **weights})
    expected = exit_router(hidden.reshape(-1, HIDDEN), *weights.values(), epsilon=1e-3)
    assert score.shape == (3, 4) and np.ptp(expected) > 0.1, "all scores alike would hide most mistakes"
    np.testing.assert_allclose(score.ravel(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("info, norms, products", [(SCORE, 1, 2), (BOTH, 1, 4)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_onnx_runtime_runs_what_it_ran_without_the_function(info, norms, products, dtype, tmp_path):
    """Guards against slower CPU inference by a function that is not inlined, a transpose or a second norm."""
    model = ir.to_proto(exit_graph_model(info, exit_tensors(info, HIDDEN), HIDDEN, dtype).model)
    session(model, tmp_path / "optimised.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]
    assert kinds.count("RMSNormalization") == norms and kinds.count("MatMul") == products
    assert kinds.count("Cast") == (0 if dtype == "fp32" else 2 if info is BOTH else 1)
    silu = 1 if "QuickGelu" in kinds else 2  # on machines where ONNX Runtime does not fuse it: Sigmoid and Mul
    assert len(kinds) == kinds.count("Cast") + norms + products + 3 + silu + (info is BOTH)  # 2 biases, sigmoid, and h + …
