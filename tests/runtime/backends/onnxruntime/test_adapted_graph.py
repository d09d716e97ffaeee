"""Low-rank products beside the products of a graph that ONNX Runtime runs."""

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tide_runtime.backends.onnxruntime.adapted_graph import adapted_graph
from tide_runtime.backends.onnxruntime.products import ModuleShape, products
from tide_runtime.errors import AdapterError
from tide_runtime.lora import LoraAdapter, LowRank

SHAPES = {"m.q": ModuleShape("m.q", 16, 64), "m.k": ModuleShape("m.k", 32, 64), "m.o": ModuleShape("m.o", 32, 48)}
JOINED, LAST = f"{SHAPES['m.q']}+{SHAPES['m.k']}", str(SHAPES["m.o"])
RANDOM = np.random.default_rng(0)
WEIGHTS = {name: RANDOM.standard_normal((outputs, inputs)).astype(np.float32) for name, outputs, inputs in SHAPES.values()}


def model(joined: str = JOINED) -> bytes:
    """q and k of x as one product, and o of their positive parts, which is the output as well."""
    nodes = [
        helper.make_node("MatMul", ["x", "qk"], [joined]),
        helper.make_node("Relu", [joined], ["h"]),
        helper.make_node("MatMul", ["h", "o"], [LAST]),
        helper.make_node("Identity", [LAST], ["y"]),
    ]
    weights = {"qk": np.concatenate([WEIGHTS["m.q"], WEIGHTS["m.k"]]), "o": WEIGHTS["m.o"]}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "tokens", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "tokens", 32])],
        [numpy_helper.from_array(weight.T.copy(), name) for name, weight in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()


def adapter(name: str, rank: int, modules: Sequence[str]) -> LoraAdapter:
    def pair(shape: ModuleShape) -> LowRank:
        return LowRank(*(RANDOM.standard_normal(s).astype(np.float32) for s in ((rank, shape.inputs), (shape.outputs, rank))))

    return LoraAdapter(name, name, {module: pair(SHAPES.get(module, SHAPES["m.q"])) for module in modules})


def reference(x: np.ndarray, own: LoraAdapter | None) -> np.ndarray:
    def product(name: str, rows: np.ndarray) -> np.ndarray:
        pair = own.modules.get(name) if own is not None else None
        return rows @ WEIGHTS[name].T + (rows @ pair.down.T @ pair.up.T if pair is not None else 0)

    return product("m.o", np.maximum(np.concatenate([product("m.q", x), product("m.k", x)], -1), 0))


def test_each_token_has_its_own_adapter() -> None:
    """Breaks: tokens with another's adapter, or the part of another module."""
    adapters = [adapter("a", 4, ["m.k", "m.o"]), adapter("b", 5, ["m.q", "m.k"])]
    session = ort.InferenceSession(adapted_graph(model(), adapters, np.float32), providers=["CPUExecutionProvider"])
    x = RANDOM.standard_normal((1, 4, 64)).astype(np.float32)
    rows = np.array([[2, 0, 1, 2]])
    found = session.run(None, {"x": x, "adapter_rows": rows})[0]
    for token, row in enumerate(rows[0]):
        wanted = reference(x[0, token : token + 1], adapters[row - 1] if row else None)[0]
        np.testing.assert_allclose(found[0, token], wanted, rtol=1e-4, atol=1e-3)


def test_names_of_modules() -> None:
    """Breaks: a product of which one module is known and the other is taken for it."""
    assert [product.modules for product in products(model())] == [(SHAPES["m.q"], SHAPES["m.k"]), (SHAPES["m.o"],)]
    assert [product.value for product in products(model("unnamed+m.k[32,64]"))] == [LAST]


def test_misfits_are_refused() -> None:
    """Breaks: an adapter of another model."""
    with pytest.raises(AdapterError, match=r"adapts m\.x, .* it has k, o, q"):
        adapted_graph(model(), [adapter("a", 4, ["m.q", "m.x"])], np.float32)
    wide = LoraAdapter("a", "", {"m.o": adapter("a", 4, ["m.q"]).modules["m.q"]})
    with pytest.raises(AdapterError, match=r"m\.o\[16,64\], the model of m\.o\[32,48\]"):
        adapted_graph(model(), [wide], np.float32)
    with pytest.raises(AdapterError, match="export it again"):
        adapted_graph(model("h0").replace(LAST.encode(), b"x" * len(LAST)), [wide], np.float32)


def test_integer_products_read_divided_inputs() -> None:
    """An adapter's product would read an input that a norm has divided by smoothing scales, as if it had not."""
    shape = SHAPES["m.q"]
    scales = RANDOM.uniform(0.5, 2, shape.inputs).astype(np.float32)
    names = {"step": np.array(1 / 127, np.float32), "zero": np.array(128, np.uint8), "last": np.array([-1])}
    names |= {
        "factors": 1 / scales,
        "w": np.zeros((shape.inputs, shape.outputs), np.int8),
        "s": np.ones(shape.outputs, np.float32),
    }
    nodes = [
        helper.make_node("Mul", ["x", "factors"], ["divided"]),
        helper.make_node("Abs", ["divided"], ["magnitude"]),
        helper.make_node("ReduceMax", ["magnitude", "last"], ["largest"], keepdims=1),
        helper.make_node("Div", ["divided", "largest"], ["share"]),
        helper.make_node("QuantizeLinear", ["share", "step", "zero"], ["integers"]),
        helper.make_node("MatMulIntegerToFloat", ["integers", "w", "step", "s", "zero"], ["sum"], domain="com.microsoft"),
        helper.make_node("Mul", ["sum", "largest"], [str(shape)]),
        helper.make_node("Identity", [str(shape)], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, "tokens", s]) for n, s in (("x", 64), ("y", 16))]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], [numpy_helper.from_array(a, n) for n, a in names.items()])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    plain = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    own = adapter("a", 4, ["m.q"])
    session = ort.InferenceSession(adapted_graph(plain, [own], np.float32, {"m.q": scales}), providers=["CPUExecutionProvider"])
    x = RANDOM.standard_normal((1, 4, 64)).astype(np.float32)
    [found] = session.run(None, {"x": x, "adapter_rows": np.ones((1, 4), np.int64)})
    pair = own.modules["m.q"]
    np.testing.assert_allclose(found, x @ pair.down.T @ pair.up.T, rtol=1e-4, atol=1e-3)
