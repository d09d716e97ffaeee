"""Stand-in for the parts of ``tensorrt`` and ``tensorrt.plugin`` that ahead-of-time plugins use, over numbers and host arrays.

A network runs a plugin immediately: it queries the output's shape, then kernel, launch and scalars, and launches the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

__version__ = "10.9.0"
float32, float16, bfloat16 = np.dtype(np.float32), np.dtype(np.float16), "bfloat16"


@dataclass
class TensorDesc:
    shape_expr: tuple[int, ...]
    dtype: Any


@dataclass
class KernelLaunchParams:
    grid_x: int = 1
    grid_y: int = 1
    grid_z: int = 1
    block_x: int = 1
    block_y: int = 1
    block_z: int = 1
    shared_mem: int = 0


class SymExprs(list[int | None]):
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


@dataclass
class Plugin:
    describe: Callable[..., TensorDesc]
    implement: Callable[..., Any] | None = None

    def __call__(self, *tensors: Any, **attributes: Any) -> tuple[Plugin, tuple[Any, ...], dict[str, Any]]:
        return self, tensors, attributes


@dataclass
class Tensor:
    """An ``ITensor`` with values."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype if self.array.dtype in (float32, float16) else bfloat16


@dataclass
class Network:
    """``launch(kernel, ptx, params, inputs, scalars, output)`` runs a kernel."""

    launch: Callable[[str, str, KernelLaunchParams, list[np.ndarray], list[int], np.ndarray], None]
    layers: list[str] = field(default_factory=list)

    def add_plugin(self, call: Any, aot: bool) -> SimpleNamespace:
        assert aot, "without it TensorRT asks for a Python implementation at run time"
        plugin, tensors, attributes = call
        descs = [TensorDesc(tensor.shape, tensor.dtype) for tensor in tensors]
        output = plugin.describe(*descs, **attributes)
        array = np.full(output.shape_expr, np.nan, output.dtype)
        values = attributes.values()
        kernel, ptx, params, scalars = plugin.implement(*descs, *values, outputs=(output,), tactic=0)
        self.launch(kernel, ptx, params, [tensor.array for tensor in tensors], list(scalars), array)
        self.layers.append(kernel)
        return SimpleNamespace(get_output=lambda index: Tensor(array))


def modules() -> dict[str, ModuleType]:
    """The stand-ins as entries of ``sys.modules``."""
    plugins: dict[str, Plugin] = {}
    op = SimpleNamespace(tide=SimpleNamespace())

    def register(name: str) -> Callable[[Any], Any]:
        def decorate(describe: Any) -> Any:
            plugins[name] = Plugin(describe)
            setattr(op.tide, name.removeprefix("tide::"), plugins[name])
            return describe

        return decorate

    def aot_impl(name: str) -> Callable[[Any], Any]:
        def decorate(implement: Any) -> Any:
            plugins[name].implement = implement
            return implement

        return decorate

    def cdiv(value: int, by: int) -> int:
        return -(-value // by)

    plugin, top = ModuleType("tensorrt.plugin"), ModuleType("tensorrt")
    classes = {"TensorDesc": TensorDesc, "KernelLaunchParams": KernelLaunchParams, "SymExprs": SymExprs, "SymIntExprs": SymExprs}
    functions = {"register": register, "aot_impl": aot_impl, "cdiv": cdiv, "from_shape_expr": TensorDesc, "SymInt32": int}
    plugin.__dict__.update(classes | functions | {"op": op})
    top.__dict__.update(float32=float32, float16=float16, bfloat16=bfloat16, plugin=plugin, __version__=__version__)
    return {"tensorrt": top, "tensorrt.plugin": plugin}
