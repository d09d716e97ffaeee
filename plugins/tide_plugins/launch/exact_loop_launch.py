"""Launching the kernels of a loop that verifies drafts from texts."""

from __future__ import annotations

from typing import Any

from tide_plugins.launch.decode_loop_launch import PLACES
from tide_plugins.launch.device_array import DeviceArray
from tide_plugins.launch.kernel_call import KernelCall
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.launch.prepared_launch import PreparedLaunch
from tide_plugins.launch.tensor_contract import Tensor
from tide_plugins.plans import plan_loop_block, plan_text_drafts

_RATES = (Tensor("hits", "i32", ("rows", "classes"), output=True), Tensor("tries", "i32", ("rows", "classes"), output=True))
DRAFT_TENSORS = (
    Tensor("text", "i32", ("rows", "room")),
    Tensor("length", "i64", ("rows",)),
    Tensor("limit", "i64", ("rows",)),
    Tensor("finished", "u8", ("rows",)),
    *_RATES,
    Tensor("least", "i32", ("classes",)),
    Tensor("prior", "f32", ("classes",)),
    Tensor("prices", "f32", ("sizes",)),
    Tensor("guess", "i32", ("rows", "drafts"), output=True),
    Tensor("guessed", "i32", ("rows",), output=True),
    Tensor("matched", "i32", ("rows",), output=True),
    Tensor("expected", "f32", ("rows", "sizes"), output=True),
    Tensor("input_ids", "i64", ("rows", "tokens"), optional=True, output=True),
    Tensor("position_ids", "i64", ("rows", "tokens"), optional=True, output=True),
    Tensor("position_ids32", "i32", ("rows", "tokens"), optional=True, output=True),
    *PLACES,
    Tensor("choice", "i32", output=True),
)
ACCEPT_TENSORS = (
    Tensor("chosen", "i64", ("rows", "tokens")),
    Tensor("choice", "i32"),
    Tensor("guess", "i32", ("rows", "drafts")),
    Tensor("guessed", "i32", ("rows",)),
    Tensor("matched", "i32", ("rows",)),
    Tensor("least", "i32", ("classes",)),
    Tensor("eos", "i64", ("eos_count",), optional=True),
    Tensor("limit", "i64", ("rows",)),
    Tensor("bound", "i64", ("rows",)),
    Tensor("text", "i32", ("rows", "room"), output=True),
    Tensor("length", "i64", ("rows",), output=True),
    Tensor("finished", "u8", ("rows",), output=True),
    *_RATES,
    Tensor("turns_left", "i32", output=True),
    Tensor("ring", "i64", ("ring_turns", "rows", "entry"), output=True),
    Tensor("counts", "i64", ("counted",), output=True),
    Tensor("proceed", "i32", output=True),
)
_DRAFTS = 15  # kMaxDrafts in csrc/text_drafts.h


def prepare_text_drafts(
    library: KernelLibrary,
    *,
    stream: Any,
    slots: int,
    draft_limit: int,
    weight: float,
    **tensors: DeviceArray | None,
) -> PreparedLaunch:
    """Check the tensors (`DRAFT_TENSORS`) and prepare the launch; the rule is in csrc/text_drafts.cuh.

    Arguments and errors as in `prepare_loop_turn`; the condition is set to ``choice``. ``draft_limit``: most drafts of a row and
    turn. ``weight``: tries that a usual rate counts as; ``prior`` is multiplied by it.
    """
    call = KernelCall(library, "text_drafts", DRAFT_TENSORS, tensors, stream)
    room = call.size("room")
    tokens = 1 << max(0, call.size("sizes") - 1)
    _check_drafts(call)
    call.require(room % 4 == 0, f"texts have room for {room} tokens; expected a multiple of 4, which are read at once")
    call.require(call.size("tokens") in (0, tokens), f"inputs are for {call.size('tokens')} tokens a row; expected {tokens}")
    call.require(tokens <= slots, f"a pass has {tokens} tokens a row, whose cache has {slots} slots; expected no more")
    params = call.params(slots=slots, draft_limit=draft_limit, weight=weight)
    plan = plan_text_drafts(params.rows)
    return call.prepare(params, {"text_drafts": plan}, {"counters": 4 * plan.counters})


def prepare_text_accept(library: KernelLibrary, *, stream: Any, **tensors: DeviceArray | None) -> PreparedLaunch:
    """Check the tensors (`ACCEPT_TENSORS`) and prepare the launch; the rule is in csrc/text_accept.cuh.

    Arguments and errors as in `prepare_loop_turn`; the condition is set to ``proceed``.
    """
    call = KernelCall(library, "text_accept", ACCEPT_TENSORS, tensors, stream)
    _check_drafts(call)
    call.require(call.size("entry") == _DRAFTS + 2, f"the ring has {call.size('entry')} places a row; expected {_DRAFTS + 2}")
    return call.prepare(call.params(), {"text_accept": plan_loop_block()}, {})


def _check_drafts(call: KernelCall) -> None:
    call.require(call.size("drafts") == _DRAFTS, f"guess has {call.size('drafts')} places a row; expected {_DRAFTS}")
