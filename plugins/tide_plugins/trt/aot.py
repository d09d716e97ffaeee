"""The exit router as ahead-of-time TensorRT plugins (10.9+), whose kernels are embedded in the engine instead of a library.

Such a plugin is a single kernel with inputs, integers and outputs, so the router consists of two plugins,
tide::exit_router_project and tide::exit_router_score (csrc/exit_router.cuh); `add_exit_router` adds both.
"""

# TensorRT reads the annotations of the decorated functions as objects: no `from __future__ import annotations` here.

import importlib
from functools import cache
from typing import Any

from tide_runtime.backends.tensorrt.package import TENSORRT
from tide_runtime.bundle.architectures import Architecture
from tide_runtime.errors import ParamsError, TargetError

from tide_plugins.build.builder import Builder
from tide_plugins.kernels import ROUTER, entry_point
from tide_plugins.launch.exit_router_launch import float_bits
from tide_plugins.plans import (
    GROUP_ROWS,
    GROUP_THREADS,
    MAX_ROUTER_WIDTH,
    SLICE_WIDTH,
    plan_exit_router,
    router_chunk,
)

# TensorRT stores PTX, which the driver compiles: for the oldest GPU of 10.9, by CUDA 12 so that older drivers can load it.
_PTX = Architecture(75, 12, "every GPU of TensorRT 10.9 and newer", ptx=True)


def add_exit_router(network: Any, hidden: Any, down: Any, down_bias: Any, up: Any, up_bias: Any, *, epsilon: float = 1e-6) -> Any:
    """Add the router to a ``tensorrt.INetworkDefinition``; returns the score [...] float32, an ``ITensor``.

    score = sigmoid(up · silu(down · rmsnorm(hidden) + down_bias) + up_bias)

    Args:
        hidden: ``ITensor`` [..., H]: fp32, fp16 or bf16.
        down: [R, H], ``down_bias`` [R], ``up`` [R] and ``up_bias`` [1], all float32; constants or weights.
        epsilon: the norm's epsilon.

    Raises:
        ParamsError: a shape does not match or is unknown.
        TargetError: TensorRT is missing or older than 10.9, or NVRTC is missing.
    """
    width, hidden_size = _checked(tuple(hidden.shape), tuple(down.shape))
    sizes = {"hidden_size": hidden_size, "width": width}
    plugins = registered()
    partial = network.add_plugin(plugins.exit_router_project(hidden, down, **sizes), aot=True).get_output(0)
    score = plugins.exit_router_score(hidden, partial, down_bias, up, up_bias, **sizes, epsilon=float(epsilon))
    return network.add_plugin(score, aot=True).get_output(0)


def _checked(hidden: tuple[int, ...], down: tuple[int, ...]) -> tuple[int, int]:
    """R and H of valid shapes. Raises ParamsError like `add_exit_router`."""
    if len(down) != 2 or min(down) < 1 or down[0] > MAX_ROUTER_WIDTH:
        raise ParamsError(
            f"down is {list(down)}; expected [R, H] with R from 1 to {MAX_ROUTER_WIDTH}, known when the engine is built"
        )
    if len(hidden) < 2 or hidden[-1] != down[1]:
        raise ParamsError(
            f"hidden is {list(hidden)}; expected [..., {down[1]}] of two dimensions or more, as down is {list(down)}"
        )
    return down[0], down[1]


@cache
def registered() -> Any:
    """``tensorrt.plugin.op.tide`` with the plugins of this module. Raises TargetError like `add_exit_router`."""
    trtp = _tensorrt_plugin()
    _register_project(trtp)
    _register_score(trtp)
    return trtp.op.tide


def _tensorrt_plugin() -> Any:
    """The module ``tensorrt.plugin``. Raises TargetError when TensorRT is missing or has no ahead-of-time plugins."""
    version = _tensorrt().__version__
    try:
        module = importlib.import_module("tensorrt.plugin")
    except ImportError as error:
        raise TargetError(f"TensorRT {version} has no tensorrt.plugin ({error}); ahead-of-time plugins need 10.9") from error
    if not hasattr(module, "aot_impl"):
        raise TargetError(f"TensorRT {version} has no ahead-of-time plugins; they need 10.9")
    return module


def _tensorrt() -> Any:
    return TENSORRT.imported()


def _register_project(trtp: Any) -> None:
    @trtp.register("tide::exit_router_project")
    def describe(hidden: trtp.TensorDesc, down: trtp.TensorDesc, hidden_size: int, width: int) -> trtp.TensorDesc:
        of_a_group = plan_exit_router(GROUP_ROWS, hidden_size, width).partial
        return trtp.from_shape_expr((_groups(trtp, hidden) * of_a_group,), dtype=_tensorrt().float32)

    @trtp.aot_impl("tide::exit_router_project")
    def implement(
        hidden: trtp.TensorDesc,
        down: trtp.TensorDesc,
        hidden_size: int,
        width: int,
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]:
        chunk = router_chunk(hidden_size)
        grid = (-(-hidden_size // chunk), -(-width // SLICE_WIDTH), _groups(trtp, hidden))
        launch = trtp.KernelLaunchParams(*grid, block_x=GROUP_THREADS)
        scalars = _integers(trtp, _rows(hidden), hidden_size, width, chunk)
        return entry_point("exit_router_project", _suffix(hidden)), ptx(), launch, scalars


def _register_score(trtp: Any) -> None:
    @trtp.register("tide::exit_router_score")
    def describe(
        hidden: trtp.TensorDesc,
        partial: trtp.TensorDesc,
        down_bias: trtp.TensorDesc,
        up: trtp.TensorDesc,
        up_bias: trtp.TensorDesc,
        hidden_size: int,
        width: int,
        epsilon: float,
    ) -> trtp.TensorDesc:
        return trtp.from_shape_expr(tuple(hidden.shape_expr)[:-1], dtype=_tensorrt().float32)

    @trtp.aot_impl("tide::exit_router_score")
    def implement(
        hidden: trtp.TensorDesc,
        partial: trtp.TensorDesc,
        down_bias: trtp.TensorDesc,
        up: trtp.TensorDesc,
        up_bias: trtp.TensorDesc,
        hidden_size: int,
        width: int,
        epsilon: float,
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]:
        shared = plan_exit_router(GROUP_ROWS, hidden_size, width).score.shared_bytes
        launch = trtp.KernelLaunchParams(_groups(trtp, hidden), block_x=GROUP_THREADS, shared_mem=shared)
        scalars = _integers(trtp, _rows(hidden), hidden_size, width, router_chunk(hidden_size), float_bits(epsilon))
        return entry_point("exit_router_score", _suffix(hidden)), ptx(), launch, scalars


def _rows(hidden: Any) -> Any:
    """The product of all dimensions but the last, a symbolic expression."""
    rows, *others = tuple(hidden.shape_expr)[:-1]
    for size in others:
        rows = rows * size
    return rows


def _groups(trtp: Any, hidden: Any) -> Any:
    return trtp.cdiv(_rows(hidden), GROUP_ROWS)


def _integers(trtp: Any, *values: Any) -> Any:
    scalars = trtp.SymIntExprs(len(values))
    for i, value in enumerate(values):
        scalars[i] = trtp.SymInt32(value)
    return scalars


def _suffix(hidden: Any) -> str:
    trt = _tensorrt()
    return {trt.float32: "f32", trt.float16: "f16", trt.bfloat16: "bf16"}[hidden.dtype]


@cache
def ptx() -> str:
    """PTX of both kernels for all element types."""
    return Builder().build(ROUTER, _PTX).image.content.rstrip(b"\0").decode()
