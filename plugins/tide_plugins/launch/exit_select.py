"""Launching `exit_select`: gathers the continuing rows, and scatters the exiting ones into the head's input."""

from __future__ import annotations

from typing import Any

from tide_plugins.launch.kernel_call import KernelCall
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.launch.prepared_launch import PreparedLaunch
from tide_plugins.launch.tensor_contract import ELEMENT, Tensor
from tide_plugins.params import ExitSelectParams
from tide_plugins.plans import plan_exit_select

TENSORS = (
    Tensor("hidden", ELEMENT, ("rows", "hidden_size"), strided=True),
    Tensor("exit_states", ELEMENT, ("rows", "hidden_size"), strided=True),
    Tensor("exit_rows", "i32", ("rows",)),
    Tensor("continue_rows", "i32", ("rows",)),
    Tensor("exit_count", "i32"),
    Tensor("continue_count", "i32"),
    Tensor("origin", "i32", ("rows",), optional=True),
    Tensor("continue_hidden", ELEMENT, ("rows", "hidden_size"), optional=True, output=True, strided=True),
    Tensor("continue_origin", "i32", ("rows",), optional=True, output=True),
    Tensor("head_input", ELEMENT, ("head_rows", "hidden_size"), optional=True, output=True, strided=True),
)


def prepare_exit_select(library: KernelLibrary, *, stream: Any, **tensors: Any) -> PreparedLaunch:
    """Check the tensors and prepare the launch; the rule is in csrc/exit_select.cuh.

    Args:
        stream: the stream that will use the tensors.
        tensors: the names, dtypes and shapes in `TENSORS`. ``exit_states``: the head's input of an exited row, ``hidden``
            itself or the translated states. ``continue_hidden`` may be ``hidden``: the rows then move in place. ``origin``: each
            row's place in ``head_input``; without it exited rows are packed.

    Raises:
        ParamsError: a tensor breaks the contract, no output is given, or an output overlaps an input.
        TargetError: the kernel cannot be built for this GPU.
    """
    call = KernelCall(library, "exit_select", TENSORS, tensors, stream)
    in_place = _check_overlaps(call)
    params = ExitSelectParams(
        hidden_stride=call.row_stride("hidden"),
        exit_stride=call.row_stride("exit_states"),
        continue_stride=call.row_stride("continue_hidden"),
        head_stride=call.row_stride("head_input"),
        rows=call.size("rows"),
        hidden_size=call.size("hidden_size"),
    )
    plan = plan_exit_select(call.size("rows"), call.size("hidden_size"), call.element_bytes, in_place)
    return call.prepare(params, {"exit_select": plan}, {})


def _check_overlaps(call: KernelCall) -> bool:
    """Whether rows move in place."""
    hidden, states = call.array("hidden"), call.array("exit_states")
    moved, head = call.array("continue_hidden"), call.array("head_input")
    origin, moved_origin = call.array("origin"), call.array("continue_origin")
    assert hidden is not None and states is not None
    call.require(call.size("hidden_size") >= 1, "hidden has no columns; expected at least 1")
    call.require(moved is not None or head is not None, "there is no continue_hidden and no head_input; expected one or both")
    call.require(moved_origin is None or origin is not None, "continue_origin needs origin")
    in_place = moved is not None and moved.pointer == hidden.pointer
    if in_place:
        same = call.row_stride("continue_hidden") == call.row_stride("hidden")
        call.require(same, "continue_hidden begins where hidden does but its rows lie elsewhere; expected the same strides")
    elif moved is not None:
        call.require(not moved.overlaps(hidden), "continue_hidden overlaps hidden; expected hidden itself, or other memory")
    for name, other in (("hidden", hidden), ("exit_states", states), ("continue_hidden", moved)):
        apart = head is None or other is None or not head.overlaps(other)
        call.require(apart, f"head_input overlaps {name}; expected memory of its own")
    own = origin is None or moved_origin is None or not moved_origin.overlaps(origin)
    call.require(own, "continue_origin overlaps origin; expected memory of its own")
    return in_place
