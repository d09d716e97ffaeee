"""Low-rank products beside the products of a graph that ONNX Runtime runs."""

from __future__ import annotations

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
