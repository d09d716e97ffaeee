"""Drive the ahead-of-time plugins through TensorRT's real Python classes, on a machine without TensorRT; prints JSON.

    python aot_in_real_bindings.py STUB...     shared libraries under the names that the bindings need, empty

`tensorrt.plugin` is Python: it checks signatures, turns descriptions into shapes and launches, and holds the kernel. What it gets
from TensorRT itself (registry, tensors, expressions) is replaced by plain numbers here.
"""

from __future__ import annotations

import ctypes
import json
import sys
from types import SimpleNamespace
from typing import Any

for stub in sys.argv[1:]:
    ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)

import tensorrt_bindings as trt  # noqa: E402

sys.modules["tensorrt"] = trt

OPERATIONS = {
    trt.DimensionOperation.PROD: lambda a, b: a * b,
    trt.DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}


class Registry(dict[tuple[str, str, str], Any]):
    def register_creator(self, creator: Any, namespace: str) -> None:
        self[creator.name, creator.plugin_version, namespace] = creator

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.get((name, version, namespace))


class Number(trt.IDimensionExpr):  # type: ignore[misc]
    """A constant of the bindings' expression type, which Python cannot construct; see `number`."""

    value: int

    def is_constant(self) -> bool:
        return False  # like a dynamic dimension


class Builder:
    def constant(self, value: int) -> Number:
        return number(value)

    def operation(self, operation: Any, first: Number, second: Number) -> Number:
        return number(OPERATIONS[operation](first.value, second.value))


class Setter(dict[int, Any]):
    nbSymExprs = 0


class Tensor(trt.ITensor):  # type: ignore[misc]
    pass


def number(value: int) -> Number:
    made = Number.__new__(Number)
    made.value = value
    return made


def linear(dtype: Any) -> Any:
    desc = trt.PluginTensorDesc()
    desc.type, desc.format = dtype, trt.TensorFormat.LINEAR
    return desc


def drive(call: Any, inputs: list[tuple[Any, tuple[int, ...]]]) -> dict[str, Any]:
    """Query the plugin created by ``call`` in the order of TensorRT's builder."""
    _, _, plugin = call(trt.QuickPluginCreationRequest.STRICT_AOT)
    types, shapes = [dtype for dtype, _ in inputs], [shape for _, shape in inputs]
    (output_type,) = plugin.get_output_data_types(types, [len(shape) for shape in shapes])
    plugin.input_types = types
    (output,) = plugin.get_output_shapes([[number(size) for size in shape] for shape in shapes], [], Builder())
    descs = []
    for dtype in (*types, output_type):
        desc = trt.DynamicPluginTensorDesc()
        desc.desc = linear(dtype)
        descs.append(desc)
    plugin.set_tactic(0)
    launch, scalars = SimpleNamespace(), Setter()
    plugin.get_launch_params(None, descs, len(inputs), launch, scalars, Builder())
    kernel, image = plugin.get_kernel([linear(dtype) for dtype in types], [linear(output_type)])
    return {
        "output": [size.value for size in output],
        "output_type": str(output_type),
        "launch": {name: value.value for name, value in vars(launch).items()},
        "scalars": [scalars[i].value for i in range(scalars.nbSymExprs)],
        "kernel": kernel,
        "in_image": f".entry {kernel}(".encode() in image,
    }


def main() -> None:
    registry = Registry()
    trt.get_plugin_registry = lambda: registry
    trt.DimsExprs = lambda length: [None] * length
    from tensorrt.plugin import _tensor
    from tide_plugins.trt import aot

    _tensor.SymExprImpl = lambda expression: expression._expr
    plugins, half, f32 = aot.registered(), trt.float16, trt.float32
    hidden, sizes = (half, (3, 5, 4096)), {"hidden_size": 4096, "width": 100}
    tensor = Tensor.__new__
    project = plugins.exit_router_project(tensor(Tensor), tensor(Tensor), **sizes)
    projected = drive(project, [hidden, (f32, (100, 4096))])
    score = plugins.exit_router_score(*(tensor(Tensor) for _ in range(5)), **sizes, epsilon=1e-5)
    scored = drive(score, [hidden, (f32, tuple(projected["output"])), (f32, (100,)), (f32, (100,)), (f32, (1,))])
    print(json.dumps({"project": projected, "score": scored}))


main()
