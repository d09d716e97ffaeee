"""Drive the ahead-of-time plugins through TensorRT's real Python classes, on a machine without TensorRT, kernels on the host.

    python aot_in_real_bindings.py STUB...     shared libraries under the names that the bindings need, empty

`tensorrt.plugin` is Python: it checks signatures, turns descriptions into shapes and launches, and holds the kernel. What it gets
from TensorRT itself (registry, tensors, expressions) is replaced by plain numbers here. Scores must be those of the reference;
what one router's plugins were launched with is printed as JSON.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from types import SimpleNamespace
from typing import Any

for stub in sys.argv[1:]:
    ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)

import tensorrt_bindings as trt  # noqa: E402

sys.modules["tensorrt"] = trt

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from plugins.host_driver import HostDriver  # noqa: E402
from tide_plugins.conformance.case import TOLERANCE  # noqa: E402
from tide_plugins.params import ExitRouterParams  # noqa: E402
from tide_plugins.plans import LaunchPlan  # noqa: E402
from tide_plugins.reference import exit_router  # noqa: E402

OPERATIONS = {
    trt.DimensionOperation.PROD: lambda a, b: a * b,
    trt.DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}
TYPES = {trt.float32: np.float32, trt.float16: np.float16, trt.bfloat16: ml_dtypes.bfloat16}
FIELDS = {
    "project": ("hidden", "down", "rows", "hidden_size", "width", "chunk", "partial"),
    "score": ("hidden", "partial", "down_bias", "up", "up_bias", "rows", "hidden_size", "width", "chunk", "epsilon", "score"),
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


class Values:
    """A tensor with ``array``, whose values have TensorRT's type ``kind``."""

    def __init__(self, array: np.ndarray, kind: Any) -> None:
        self.array, self.kind, self.shape = array, kind, array.shape


def number(value: int) -> Number:
    made = Number.__new__(Number)
    made.value = value
    return made


def linear(dtype: Any) -> Any:
    desc = trt.PluginTensorDesc()
    desc.type, desc.format = dtype, trt.TensorFormat.LINEAR
    return desc


class Network:
    """Runs a plugin when it is added. ``launched``: what its builder is told of each."""

    def __init__(self) -> None:
        self.launched: dict[str, Any] = {}

    def add_plugin(self, call: Any, aot: bool) -> SimpleNamespace:
        assert aot, "without it TensorRT asks for a Python implementation at run time"
        plugin, inputs = call
        types, shapes = [value.kind for value in inputs], [value.shape for value in inputs]
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
        given = {name: value.value for name, value in vars(launch).items()}
        integers = [scalars[i].value for i in range(scalars.nbSymExprs)]
        array = np.full([size.value for size in output], np.nan, TYPES[output_type])
        run(kernel, image.decode(), given, [value.array for value in inputs], integers, array)
        self.launched[kernel.split("_")[-2]] = {"output": list(array.shape), "launch": given, "scalars": integers}
        return SimpleNamespace(get_output=lambda index: Values(array, output_type))


def run(kernel: str, ptx: str, launch: dict[str, int], inputs: list, integers: list[int], output: np.ndarray) -> None:
    """Run the kernel on the host, with arguments in TensorRT's order."""
    signature = re.search(rf"\.entry {kernel}\(([^)]*)\)", ptx)
    assert signature, f"{kernel} is not in the PTX"
    assert re.findall(r"\.param \.(\w+)", signature[1]) == ["u64"] * len(inputs) + ["u32"] * len(integers) + ["u64"]
    fields, arguments = FIELDS[kernel.split("_")[-2]], ExitRouterParams()
    values = [*(array.ctypes.data for array in inputs), *integers, output.ctypes.data]
    for name, value in zip(fields, values, strict=True):
        setattr(arguments, name, value)
    grid = launch["grid_x"], launch["grid_y"], launch["grid_z"]
    block = launch["block_x"], launch["block_y"], launch["block_z"]
    HostDriver().launch(kernel, LaunchPlan(grid, block, launch["shared_mem"]), arguments, 0, fields)


def scored(aot: Any, kind: Any, rows: tuple[int, ...], hidden_size: int, width: int) -> dict[str, Any]:
    """Add a router of random weights. What its plugins were launched with."""
    random, network = np.random.default_rng([*rows, hidden_size, width]), Network()
    hidden = random.normal(size=(*rows, hidden_size)).astype(TYPES[kind])
    down = (random.normal(size=(width, hidden_size)) / np.sqrt(hidden_size)).astype(np.float32)
    arrays = [hidden, down, *(random.normal(size=size).astype(np.float32) for size in (width, width, 1))]
    values = [Values(array, kind if array is hidden else trt.float32) for array in arrays]
    score = aot.add_exit_router(network, *values, epsilon=1e-5).array
    flat = [hidden.reshape(-1, hidden_size), *arrays[1:]]
    expected = exit_router(*(array.astype(np.float64) for array in flat), epsilon=1e-5)
    assert score.shape == rows
    np.testing.assert_allclose(score.ravel(), expected, rtol=TOLERANCE["f32"])
    return network.launched


def main() -> None:
    registry = Registry()
    trt.get_plugin_registry = lambda: registry
    trt.DimsExprs = lambda length: [None] * length
    from tensorrt.plugin import _tensor
    from tide_plugins.trt import aot

    _tensor.SymExprImpl = lambda expression: expression._expr
    real = aot.registered()

    def with_values(create: Any) -> Any:
        def call(*values: Values, **attributes: Any) -> tuple[Any, tuple[Values, ...]]:
            made = create(*(Tensor.__new__(Tensor) for _ in values), **attributes)
            return made(trt.QuickPluginCreationRequest.STRICT_AOT)[2], values

        return call

    plugins = SimpleNamespace(
        exit_router_project=with_values(real.exit_router_project), exit_router_score=with_values(real.exit_router_score)
    )
    aot.registered = lambda: plugins
    for kind in TYPES:
        for rows, hidden_size, width in (((1, 1), 64, 1), ((2, 3), 111, 17), ((1, 257), 130, 250)):
            scored(aot, kind, rows, hidden_size, width)
    print(json.dumps(scored(aot, trt.float16, (3, 5), 4096, 100)))


main()
