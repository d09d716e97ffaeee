"""Launching a decode loop's kernels: all of `kernels.KERNELS` but the router."""

from __future__ import annotations

from typing import Any

from tide_plugins.launch.device_array import DeviceArray
from tide_plugins.launch.kernel_call import KernelCall
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.launch.prepared_launch import PreparedLaunch
from tide_plugins.launch.tensor_contract import ELEMENT, Tensor
from tide_plugins.plans import plan_choose_token, plan_exit_score, plan_exit_states, plan_loop_block

PLACES = (
    Tensor("write_index", "i64", ("rows",), optional=True, output=True),
    Tensor("write_index32", "i32", ("rows",), optional=True, output=True),
    Tensor("seqlens_k", "i32", ("rows",), optional=True, output=True),
)
TURN_TENSORS = (
    Tensor("emitted", "i32", ("rows",)),
    Tensor("exits", "u8", ("rows",)),
    Tensor("length", "i64", ("rows",)),
    Tensor("last_token", "i64", ("rows",)),
    Tensor("running", "i32"),
    Tensor("turns_left", "i32", output=True),
    Tensor("ring", "i64", ("ring_turns", "rows"), output=True),
    Tensor("counts", "i64", ("counted",), output=True),
    Tensor("input_ids", "i64", ("rows",), optional=True, output=True),
    Tensor("position_ids", "i64", ("rows",), optional=True, output=True),
    Tensor("position_ids32", "i32", ("rows",), optional=True, output=True),
    *PLACES,
    Tensor("proceed", "i32", output=True),
)
TAKE_TENSORS = (
    Tensor("chosen", "i64", ("rows",)),
    Tensor("eos", "i64", ("eos_count",), optional=True),
    Tensor("limit", "i64", ("rows",)),
    Tensor("length", "i64", ("rows",), output=True),
    Tensor("last_token", "i64", ("rows",), output=True),
    Tensor("finished", "u8", ("rows",), output=True),
    Tensor("emitted", "i32", ("rows",), output=True),
    Tensor("running", "i32", output=True),
)
SCORE_TENSORS = (
    Tensor("logits", ELEMENT, ("rows", "vocab")),
    Tensor("token", "i64", ("rows",)),
    Tensor("mlp_score", "f32", ("rows",), optional=True),
    Tensor("score", "f32", ("rows",), output=True),
)
CHOOSE_TENSORS = (
    Tensor("logits", ELEMENT, ("rows", "vocab")),
    Tensor("temperature", "f32", ("sequences",)),
    Tensor("top_k", "i32", ("sequences",)),
    Tensor("tail", "f32", ("sequences",)),
    Tensor("min_p", "f32", ("sequences",)),
    Tensor("key", "u64", ("sequences", "words")),
    Tensor("length", "i64", ("sequences",)),
    Tensor("finished", "u8", ("sequences",)),
    Tensor("chosen", "i64", ("rows",), output=True),
)
CANDIDATE_TENSORS = (
    Tensor("finished", "u8", ("rows",)),
    Tensor("exits", "u8", ("rows",)),
    Tensor("score", "f32", ("rows",), output=True),
    Tensor("wanted", "i32", output=True),
    Tensor("counts", "i64", ("counted",), output=True),
)
JOIN_TENSORS = (
    Tensor("states", "u8", ("rows", "arriving", "row_bytes")),
    Tensor("finished", "u8", ("rows",)),
    Tensor("waiting", "i32", ("exits", "rows")),
    Tensor("window", "u8", ("rows", "width", "row_bytes"), output=True),
    Tensor("last", "u8", ("rows", "row_bytes"), optional=True, output=True),
)
GATE_TENSORS = (
    Tensor("score", "f32", ("rows",)),
    Tensor("exit_token", "i64", ("rows",)),
    Tensor("finished", "u8", ("rows",)),
    Tensor("turns_left", "i32"),
    Tensor("waiting", "i32", ("exits", "rows"), output=True),
    Tensor("exits", "u8", ("rows",), output=True),
    Tensor("chosen", "i64", ("rows",), output=True),
    Tensor("deeper", "i32", output=True),
    Tensor("counts", "i64", ("counted",), output=True),
)
INPUT_TENSORS = (
    Tensor("window", "u8", ("rows", "width", "row_bytes")),
    Tensor("finished", "u8", ("rows",)),
    Tensor("length", "i64", ("rows",)),
    Tensor("waiting", "i32", ("exits", "rows")),
    Tensor("states", "u8", ("rows", "width", "row_bytes"), output=True),
    Tensor("position_ids", "i64", ("rows", "width"), optional=True, output=True),
    Tensor("position_ids32", "i32", ("rows", "width"), optional=True, output=True),
    *PLACES,
    Tensor("logits_index", "i64", ("rows",), optional=True, output=True),
    Tensor("logits_index32", "i32", ("rows",), optional=True, output=True),
    Tensor("choice", "i32", output=True),
)
MERGE_TENSORS = (
    Tensor("exits", "u8", ("rows",)),
    Tensor("deep_token", "i64", ("rows",)),
    Tensor("chosen", "i64", ("rows",), output=True),
    Tensor("waiting", "i32", ("exits", "rows"), output=True),
)


def prepare_loop_turn(library: KernelLibrary, *, stream: Any, slots: int, **tensors: DeviceArray | None) -> PreparedLaunch:
    """Check the tensors (`TURN_TENSORS`) and prepare the launch; the rule is in csrc/loop_turn.cuh.

    The launch's graph condition (`PreparedLaunch.with_condition`) is set to ``proceed``.

    Args:
        stream: the stream that will use the tensors.
        slots: slots of the KV caches.

    Raises:
        ParamsError: a tensor breaks the contract.
        TargetError: the kernel cannot be built for this GPU.
    """
    call = KernelCall(library, "loop_turn", TURN_TENSORS, tensors, stream)
    params = call.params(slots=slots)
    return call.prepare(params, {"loop_turn": plan_loop_block()}, {})


def prepare_take_tokens(library: KernelLibrary, *, stream: Any, **tensors: DeviceArray | None) -> PreparedLaunch:
    """Check the tensors (`TAKE_TENSORS`) and prepare the launch. Errors as in `prepare_loop_turn`."""
    call = KernelCall(library, "take_tokens", TAKE_TENSORS, tensors, stream)
    return call.prepare(call.params(), {"take_tokens": plan_loop_block()}, {})


def prepare_exit_score(
    library: KernelLibrary, *, stream: Any, mlp_threshold: float = 0.0, **tensors: DeviceArray | None
) -> PreparedLaunch:
    """Check the tensors (`SCORE_TENSORS`) and prepare the launch; the rule is in csrc/exit_score.cuh.

    Args:
        stream: the stream that will use the tensors.
        mlp_threshold: rows with a lower ``mlp_score`` get the score -1.

    Raises:
        ParamsError: a tensor breaks the contract.
        TargetError: the kernel cannot be built for this GPU.
    """
    call = KernelCall(library, "exit_score", SCORE_TENSORS, tensors, stream)
    params = call.params(mlp_threshold=mlp_threshold)
    plan = plan_exit_score(params.rows, params.vocab, call.element_bytes)
    return call.prepare(params, {"exit_score": plan}, {"counters": 4 * plan.counters, "workspace": plan.workspace_bytes})


def prepare_choose_token(library: KernelLibrary, *, stream: Any, **tensors: DeviceArray | None) -> PreparedLaunch:
    """Check the tensors (`CHOOSE_TENSORS`) and prepare the launches; the rule is in csrc/choose_token.cuh.

    Row b · S + s of the logits is of sequence b and follows its cached tokens, ``length``, and s + 1 more.

    Raises:
        ParamsError: a tensor breaks the contract.
        TargetError: the kernel cannot be built for this GPU.
    """
    call = KernelCall(library, "choose_token", CHOOSE_TENSORS, tensors, stream)
    rows, sequences = call.size("rows"), call.size("sequences")
    call.require(sequences > 0 and rows % sequences == 0, f"{rows} rows are no multiple of {sequences} sequences")
    call.require(call.size("words") == 2, f"a key has {call.size('words')} words; expected 2")
    params = call.params(tokens=rows // sequences)
    plan = plan_choose_token(rows, params.vocab)
    forms = dict.fromkeys(("choose_peak", "choose_cut", "choose_race"), plan)
    return call.prepare(params, forms, {"counters": 4 * plan.counters, "workspace": plan.workspace_bytes})


def prepare_exit_candidates(
    library: KernelLibrary,
    *,
    stream: Any,
    exit_count: int,
    number: int,
    threshold: float,
    has_mlp: bool,
    **tensors: DeviceArray | None,
) -> PreparedLaunch:
    """Check the tensors (`CANDIDATE_TENSORS`) and prepare the launch; the rule is in csrc/exit_candidates.cuh.

    Arguments and errors as in `prepare_loop_turn`; the condition is set to ``wanted``. ``number``: the exit's number of
    ``exit_count``, 1 for the first. ``threshold``: least score of rows that may exit, if the exit ``has_mlp``; then ``score`` has
    the MLP's scores. ``counts``: element ``exit_count + number`` counts the turns with a candidate.
    """
    call = KernelCall(library, "exit_candidates", CANDIDATE_TENSORS, tensors, stream)
    _check_number(call, number, exit_count)
    _check_counts(call, exit_count + number)
    params = call.params(exit_count=exit_count, number=number, threshold=threshold, has_mlp=has_mlp)
    return call.prepare(params, {"exit_candidates": plan_loop_block()}, {})


def prepare_exit_join(library: KernelLibrary, *, stream: Any, number: int, **tensors: DeviceArray | None) -> PreparedLaunch:
    """Check the tensors (`JOIN_TENSORS`) and prepare the launch; the rule is in csrc/exit_join.cuh.

    Arguments and errors as in `prepare_loop_turn`. ``number``: the exit's number, 1 for the first.
    """
    call = KernelCall(library, "exit_join", JOIN_TENSORS, tensors, stream)
    _check_number(call, number, call.size("exits"))
    arriving, width = call.size("arriving"), call.size("width")
    call.require(arriving <= width, f"{arriving} states of a row may arrive, its window has {width} places; expected no more")
    params = call.params(number=number)
    return call.prepare(params, {"exit_join": plan_exit_states(params.rows, arriving)}, {})


def prepare_exit_gate(
    library: KernelLibrary,
    *,
    stream: Any,
    threshold: float,
    number: int,
    width: int,
    **tensors: DeviceArray | None,
) -> PreparedLaunch:
    """Check the tensors (`GATE_TENSORS`) and prepare the launch; the rule is in csrc/exit_gate.cuh.

    Arguments and errors as in `prepare_loop_turn`. ``threshold``: least score of rows that exit. ``number``: the exit's number, 1
    for the first. ``width``: most pending tokens of a row, over all exits.
    """
    call = KernelCall(library, "exit_gate", GATE_TENSORS, tensors, stream)
    _check_number(call, number, call.size("exits"))
    _check_counts(call, number)
    params = call.params(width=width, exit_count=call.size("exits"), number=number, threshold=threshold)
    return call.prepare(params, {"exit_gate": plan_loop_block()}, {})


def prepare_exit_inputs(
    library: KernelLibrary, *, stream: Any, slots: int, number: int, **tensors: DeviceArray | None
) -> PreparedLaunch:
    """Check the tensors (`INPUT_TENSORS`) and prepare the launch; the rule is in csrc/exit_inputs.cuh.

    Arguments and errors as in `prepare_loop_turn`; the condition is set to ``choice``. ``number``: the exit's number, 1 for the
    first.
    """
    call = KernelCall(library, "exit_inputs", INPUT_TENSORS, tensors, stream)
    _check_number(call, number, call.size("exits"))
    width = call.size("width")
    call.require(width & (width - 1) == 0, f"the window has {width} places; expected a power of two")
    call.require(width <= slots, f"the window has {width} places, a row's cache {slots} slots; expected no more")
    params = call.params(slots=slots, number=number)
    return call.prepare(params, {"exit_inputs": plan_exit_states(params.rows, width)}, {})


def prepare_exit_merge(library: KernelLibrary, *, stream: Any, **tensors: DeviceArray | None) -> PreparedLaunch:
    """Check the tensors (`MERGE_TENSORS`) and prepare the launch. Errors as in `prepare_loop_turn`."""
    call = KernelCall(library, "exit_merge", MERGE_TENSORS, tensors, stream)
    params = call.params(exit_count=call.size("exits"))
    return call.prepare(params, {"exit_merge": plan_loop_block()}, {})


def _check_number(call: KernelCall, number: int, exit_count: int) -> None:
    call.require(1 <= number <= exit_count, f"exit {number} of {exit_count}; they are numbered from 1")


def _check_counts(call: KernelCall, place: int) -> None:
    call.require(place < call.size("counted"), f"counts has {call.size('counted')} elements; expected more than {place}")
