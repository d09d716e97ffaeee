"""The exit router as ahead-of-time TensorRT plugins (10.9+), whose kernels are embedded in the engine instead of a library.

Such a plugin is a single kernel with inputs, integers and outputs, and without zero-initialized memory. Therefore the router
consists of two plugins, tide::exit_router_project and tide::exit_router_score (csrc/exit_router_split.cuh); `add_exit_router`
adds both.
"""

# TensorRT reads the annotations of the decorated functions as objects: no `from __future__ import annotations` here.

import struct
from functools import cache
from typing import Any

from tide_runtime.bundle.architectures import Architecture
from tide_runtime.errors import ParamsError

from tide_plugins.build.builder import Builder
from tide_plugins.kernels import ROUTER_SPLIT, entry_point
from tide_plugins.plans import GROUP_ROWS, GROUP_THREADS, MAX_ROUTER_WIDTH, MOST_DECODE_ROWS, SLICE_WIDTH, plan_exit_router
from tide_plugins.trt.library import tensorrt, tensorrt_plugin

# TensorRT stores PTX, which the driver compiles: for the oldest GPU of 10.9, by CUDA 12 so that older drivers can load it.
_PTX = Architecture(75, 12, "every GPU of TensorRT 10.9 and newer", ptx=True)


def add_exit_router(
    network: Any,
    hidden: Any,
    down: Any,
    down_bias: Any,
    up: Any,
    up_bias: Any,
    *,
    rows: int,
    sm_count: int,
    epsilon: float = 1e-6,
) -> Any:
    """Add the router to a ``tensorrt.INetworkDefinition``; returns the score [...] float32, an ``ITensor``.

    score = sigmoid(up · silu(down · rmsnorm(hidden) + down_bias) + up_bias)

    Args:
        hidden: ``ITensor`` [..., H]: fp32, fp16 or bf16.
        down: [R, H], like ``hidden``; ``down_bias`` [R], ``up`` [R] and ``up_bias`` [1] float32; constants or weights.
        rows: tokens of a usual step, which the launch is optimized for; other numbers give the same scores.
        sm_count: multiprocessors of the GPU, which the launch is optimized for.
        epsilon: the norm's epsilon.

    Raises:
        ParamsError: a shape does not match or is unknown.
        TargetError: TensorRT is missing or older than 10.9, or NVRTC is missing.
    """
    width, hidden_size = _checked(tuple(hidden.shape), tuple(down.shape))
    element_bytes = 4 if hidden.dtype == tensorrt().float32 else 2
    plan = plan_exit_router(min(rows, MOST_DECODE_ROWS), hidden_size, width, element_bytes, sm_count)
    sizes = {"hidden_size": hidden_size, "width": width, "chunk": plan.chunk}
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
    trtp = tensorrt_plugin()
    _register_project(trtp)
    _register_score(trtp)
    return trtp.op.tide


def _register_project(trtp: Any) -> None:
    @trtp.register("tide::exit_router_project")
    def describe(hidden: trtp.TensorDesc, down: trtp.TensorDesc, hidden_size: int, width: int, chunk: int) -> trtp.TensorDesc:
        chunks, slices = -(-hidden_size // chunk), -(-width // SLICE_WIDTH)
        floats_per_group = chunks * GROUP_ROWS * (slices * SLICE_WIDTH + 2)
        return trtp.from_shape_expr((_groups(trtp, hidden) * floats_per_group,), dtype=tensorrt().float32)

    @trtp.aot_impl("tide::exit_router_project")
    def implement(
        hidden: trtp.TensorDesc,
        down: trtp.TensorDesc,
        hidden_size: int,
        width: int,
        chunk: int,
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]:
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
        chunk: int,
        epsilon: float,
    ) -> trtp.TensorDesc:
        return trtp.from_shape_expr(tuple(hidden.shape_expr)[:-1], dtype=tensorrt().float32)

    @trtp.aot_impl("tide::exit_router_score")
    def implement(
        hidden: trtp.TensorDesc,
        partial: trtp.TensorDesc,
        down_bias: trtp.TensorDesc,
        up: trtp.TensorDesc,
        up_bias: trtp.TensorDesc,
        hidden_size: int,
        width: int,
        chunk: int,
        epsilon: float,
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]:
        pitch = -(-width // SLICE_WIDTH) * SLICE_WIDTH
        grid = (-(-hidden_size // chunk), 1, _groups(trtp, hidden))
        launch = trtp.KernelLaunchParams(*grid, block_x=GROUP_THREADS, shared_mem=GROUP_ROWS * pitch * 4)
        scalars = _integers(trtp, _rows(hidden), hidden_size, width, float_bits(epsilon))
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
    trt = tensorrt()
    return {trt.float32: "f32", trt.float16: "f16", trt.bfloat16: "bf16"}[hidden.dtype]


def float_bits(value: float) -> int:
    """The bits of a float32 as an int32, because scalars of a plugin are integers."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


@cache
def ptx() -> str:
    """PTX of both kernels for all element types."""
    return Builder().build(ROUTER_SPLIT, _PTX).image.content.rstrip(b"\0").decode()
