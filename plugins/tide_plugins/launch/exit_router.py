"""Launching `exit_router`: scores, exit flags, and the lists of exiting and continuing rows."""

from __future__ import annotations

from typing import Any

from tide_plugins.launch.kernel_call import KernelCall
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.launch.prepared_launch import PreparedLaunch
from tide_plugins.launch.tensor_contract import ELEMENT, Tensor
from tide_plugins.params import ExitRouterParams
from tide_plugins.plans import MAX_ROUTER_WIDTH, plan_exit_router

TENSORS = (
    Tensor("hidden", ELEMENT, ("rows", "hidden_size"), strided=True),
    Tensor("down", ELEMENT, ("width", "hidden_size")),
    Tensor("down_sum", "f32", ("width",), optional=True),
    Tensor("down_bias", "f32", ("width",)),
    Tensor("up", "f32", ("width",)),
    Tensor("up_bias", "f32"),
    Tensor("row_count", "i32", optional=True),
    Tensor("score", "f32", ("rows",), output=True),
    Tensor("exits", "u8", ("rows",), output=True),
    Tensor("exit_rows", "i32", ("rows",), output=True),
    Tensor("continue_rows", "i32", ("rows",), output=True),
    Tensor("exit_count", "i32", output=True),
    Tensor("continue_count", "i32", output=True),
    Tensor("verdict", "i32", output=True),
)


def prepare_exit_router(
    library: KernelLibrary, *, threshold: float, epsilon: float, stream: Any, graph_condition: int | None = None, **tensors: Any
) -> PreparedLaunch:
    """Check the tensors and prepare the launch; the formula is in csrc/exit_router.cuh.

    Args:
        threshold: a row exits iff its score is at least this; a NaN score never does.
        epsilon: the norm's epsilon.
        stream: the stream that will use the tensors, on which scratch memory is allocated.
        graph_condition: ``cudaGraphConditionalHandle`` to set to the verdict.
        tensors: the names, dtypes and shapes in `TENSORS`. ``down_sum``, the sums of the rows of ``down``, makes the norm a
            LayerNorm; without it, it is an RMSNorm. ``row_count``: the live rows, a scalar in device memory. ``verdict``: 0
            when no row continues, 1 when some do, 2 when all do.

    Raises:
        ParamsError: a tensor or a number breaks the contract.
        TargetError: the kernel cannot be built for this GPU, or sets no graph condition there.
    """
    call = KernelCall(library, "exit_router", TENSORS, tensors, stream)
    rows, hidden_size, width = call.size("rows"), call.size("hidden_size"), call.size("width")
    call.require(1 <= width <= MAX_ROUTER_WIDTH, f"down has {width} rows; expected 1 to {MAX_ROUTER_WIDTH}")
    call.require(hidden_size >= 1, "hidden has no columns; expected at least 1")
    plan = plan_exit_router(rows, hidden_size, width, call.element_bytes, library.driver.sm_count)
    params = ExitRouterParams(
        row_stride=call.row_stride("hidden"),
        rows=rows,
        hidden_size=hidden_size,
        width=width,
        chunk=plan.chunk,
        threshold=threshold,
        epsilon=epsilon,
        tile_rows=plan.tile_rows,
    )
    call.set_condition(params, graph_condition)
    form = "exit_router_tiled" if plan.tiled else "exit_router"
    scratch = {"counters": 4 * plan.launch.counters, "workspace": plan.launch.workspace_bytes}
    return call.prepare(params, {form: plan.launch}, scratch)
