"""Launching `exit_translate`: the low-rank exit head, in two launches."""

from __future__ import annotations

from typing import Any

from tide_plugins.launch.kernel_call import KernelCall
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.launch.prepared_launch import PreparedLaunch
from tide_plugins.launch.tensor_contract import ELEMENT, Tensor
from tide_plugins.params import ExitTranslateParams
from tide_plugins.plans import MAX_RANK, plan_exit_translate

TENSORS = (
    Tensor("hidden", ELEMENT, ("hidden_rows", "hidden_size"), strided=True),
    Tensor("down", ELEMENT, ("rank", "hidden_size")),
    Tensor("down_sum", "f32", ("rank",), optional=True),
    Tensor("up", ELEMENT, ("hidden_size", "rank")),
    Tensor("row_list", "i32", ("rows",), optional=True),
    Tensor("row_count", "i32", optional=True),
    Tensor("origin", "i32", ("hidden_rows",), optional=True),
    Tensor("out", ELEMENT, ("out_rows", "hidden_size"), output=True, strided=True),
)


def prepare_exit_translate(library: KernelLibrary, *, epsilon: float, stream: Any, **tensors: Any) -> PreparedLaunch:
    """Check the tensors and prepare both launches: out = h + up · (down · norm(h)), csrc/exit_translate.cuh.

    Args:
        epsilon: the norm's epsilon.
        stream: the stream that will use the tensors, on which scratch memory is allocated.
        tensors: the names, dtypes and shapes in `TENSORS`. ``down_sum``, the sums of the rows of ``down``, makes the norm a
            LayerNorm; without it, it is an RMSNorm. ``row_list`` and ``row_count``: which rows, as exit_router wrote them;
            without them all. ``origin``: the place in ``out`` of each row of ``hidden``; without it they are packed. ``out``
            may be ``hidden`` where every row keeps its place.

    Raises:
        ParamsError: a tensor or a number breaks the contract.
        TargetError: the kernel cannot be built for this GPU.
    """
    call = KernelCall(library, "exit_translate", TENSORS, tensors, stream)
    rank, hidden_size = call.size("rank"), call.size("hidden_size")
    rows = call.size("hidden_rows" if call.array("row_list") is None else "rows")
    call.require(1 <= rank <= MAX_RANK, f"down has {rank} rows; expected 1 to {MAX_RANK}")
    call.require(hidden_size >= 1, "hidden has no columns; expected at least 1")
    _check_output(call, rows)
    plan = plan_exit_translate(rows, hidden_size, rank, call.element_bytes, library.driver.sm_count)
    params = ExitTranslateParams(
        row_stride=call.row_stride("hidden"),
        out_stride=call.row_stride("out"),
        rows=rows,
        hidden_size=hidden_size,
        rank=rank,
        chunk=plan.chunk,
        epsilon=epsilon,
    )
    scratch = {"counters": 4 * plan.down.counters, "workspace": plan.down.workspace_bytes, "code": 4 * rows * rank}
    return call.prepare(params, {"exit_translate_down": plan.down, "exit_translate_up": plan.up}, scratch)


def _check_output(call: KernelCall, rows: int) -> None:
    hidden, out = call.array("hidden"), call.array("out")
    assert hidden is not None and out is not None
    if call.array("origin") is None:
        call.require(out.shape[0] >= rows, f"out has {out.shape[0]} rows; expected room for {rows}")
    if out.overlaps(hidden):
        same = out.pointer == hidden.pointer and call.row_stride("out") == call.row_stride("hidden")
        keeps_place = (call.array("row_list") is None) == (call.array("origin") is None)
        expected = "other memory, or hidden itself with every row in its place"
        call.require(same and keeps_place, f"out overlaps hidden; expected {expected}")
