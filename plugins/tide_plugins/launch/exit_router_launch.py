"""Launching `exit_router`: the scores of an exit's MLP router."""

from __future__ import annotations

import struct
from typing import Any

from tide_plugins.launch.device_array import DeviceArray
from tide_plugins.launch.kernel_call import KernelCall
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.launch.prepared_launch import PreparedLaunch
from tide_plugins.launch.tensor_contract import ELEMENT, Tensor
from tide_plugins.plans import MAX_ROUTER_WIDTH, plan_exit_router

TENSORS = (
    Tensor("hidden", ELEMENT, ("rows", "hidden_size")),
    Tensor("down", "f32", ("width", "hidden_size")),
    Tensor("down_bias", "f32", ("width",)),
    Tensor("up", "f32", ("width",)),
    Tensor("up_bias", "f32"),
    Tensor("score", "f32", ("rows",), output=True),
    Tensor("partial", "f32", ("partial",), optional=True, output=True),
)
_SIZES = ("rows", "hidden_size", "width", "chunk")
_ARGUMENTS = {
    "exit_router_project": ("hidden", "down", *_SIZES, "partial"),
    "exit_router_score": ("hidden", "partial", "down_bias", "up", "up_bias", *_SIZES, "epsilon", "score"),
}


def prepare_exit_router(library: KernelLibrary, *, epsilon: float, stream: Any, **tensors: DeviceArray | None) -> PreparedLaunch:
    """Check the tensors and prepare the two launches; the formula is in csrc/exit_router.cuh.

    Args:
        epsilon: the norm's epsilon.
        stream: the stream that will use the tensors, on which scratch memory is allocated.
        tensors: the names, dtypes and shapes in `TENSORS`. ``partial``: scratch memory of the plan's size; without it the launch
            allocates its own.

    Raises:
        ParamsError: a tensor or a number breaks the contract.
        TargetError: the kernel cannot be built for this GPU.
    """
    call = KernelCall(library, "exit_router", TENSORS, tensors, stream)
    rows = call.size("rows")
    hidden_size = call.size("hidden_size")
    width = call.size("width")
    call.require(1 <= width <= MAX_ROUTER_WIDTH, f"down has {width} rows; expected 1 to {MAX_ROUTER_WIDTH}")
    call.require(hidden_size >= 1, "hidden has no columns; expected at least 1")
    plan = plan_exit_router(rows, hidden_size, width)
    params = call.params(chunk=plan.chunk, epsilon=float_bits(epsilon))
    plans = {"exit_router_project": plan.project, "exit_router_score": plan.score}
    scratch = call.size("partial")
    call.require(scratch in (0, plan.partial), f"partial has {scratch} elements; expected {plan.partial}")
    return call.prepare(params, plans, {} if scratch else {"partial": 4 * plan.partial}, _ARGUMENTS)


def float_bits(value: float) -> int:
    """The bits of a float32 as an int32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
