"""ctypes versions of the kernels' parameter structs in `csrc/*_params.h`, which document shapes and meanings.

Pointers are device addresses as integers; 0 is null. A test compares sizes and offsets with the compiler's.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_uint64

POINTER = c_uint64


def _fields(pointers: str, *rest: tuple[str, type]) -> list[tuple[str, type]]:
    """Pointer fields by name, then ``rest``: (names, type)."""
    return [(name, POINTER) for name in pointers.split()] + [(name, kind) for names, kind in rest for name in names.split()]


class ExitRouterParams(Structure):
    """The arguments of both kernels in csrc/exit_router.cuh, which take them one by one. ``epsilon``: the bits of a float."""

    _fields_ = _fields(
        "hidden down down_bias up up_bias score partial",
        ("rows hidden_size width chunk epsilon", c_int32),
    )


class TakeTokensParams(Structure):
    """`take_tokens_params` in csrc/take_tokens_params.h."""

    _fields_ = _fields("chosen eos limit length last_token finished emitted running", ("rows eos_count", c_int32))


class LoopTurnParams(Structure):
    """`loop_turn_params` in csrc/loop_turn_params.h."""

    _fields_ = _fields(
        "emitted exits length last_token running turns_left ring counts input_ids position_ids position_ids32 "
        "write_index write_index32 seqlens_k proceed",
        ("graph_condition", c_uint64),
        ("slots", c_int64),
        ("rows ring_turns sets_condition reserved", c_int32),
    )


class ExitScoreParams(Structure):
    """`exit_score_params` in csrc/exit_score_params.h."""

    _fields_ = _fields(
        "logits token mlp_score score workspace counters",
        ("rows vocab", c_int32),
        ("mlp_threshold", c_float),
        ("reserved", c_int32),
    )


class ChooseTokenParams(Structure):
    """`choose_token_params` in csrc/choose_token_params.h."""

    _fields_ = _fields(
        "logits temperature top_k tail min_p key length finished chosen workspace counters",
        ("rows vocab tokens reserved", c_int32),
    )


class ExitJoinParams(Structure):
    """`exit_join_params` in csrc/exit_join_params.h."""

    _fields_ = _fields("states finished waiting window last", ("row_bytes", c_int64), ("rows arriving width number", c_int32))


class ExitCandidatesParams(Structure):
    """`exit_candidates_params` in csrc/exit_candidates_params.h."""

    _fields_ = _fields(
        "finished exits score wanted counts",
        ("graph_condition", c_uint64),
        ("rows exit_count number", c_int32),
        ("threshold", c_float),
        ("has_mlp sets_condition", c_int32),
    )


class ExitGateParams(Structure):
    """`exit_gate_params` in csrc/exit_gate_params.h."""

    _fields_ = _fields(
        "score exit_token finished turns_left waiting exits chosen deeper counts",
        ("graph_condition", c_uint64),
        ("rows width exit_count number", c_int32),
        ("threshold", c_float),
        ("sets_condition", c_int32),
    )


class ExitInputsParams(Structure):
    """`exit_inputs_params` in csrc/exit_inputs_params.h."""

    _fields_ = _fields(
        "window finished length waiting states position_ids position_ids32 write_index write_index32 seqlens_k logits_index "
        "logits_index32 choice",
        ("graph_condition", c_uint64),
        ("slots row_bytes", c_int64),
        ("rows width number sets_condition", c_int32),
    )


class ExitMergeParams(Structure):
    """`exit_merge_params` in csrc/exit_merge_params.h."""

    _fields_ = _fields("exits deep_token chosen waiting", ("rows exit_count", c_int32))


class TextDraftsParams(Structure):
    """`text_drafts_params` in csrc/text_drafts_params.h."""

    _fields_ = _fields(
        "text length limit finished hits tries least prior prices guess guessed matched expected input_ids position_ids "
        "position_ids32 write_index write_index32 seqlens_k choice counters",
        ("graph_condition", c_uint64),
        ("room slots", c_int64),
        ("rows classes sizes draft_limit", c_int32),
        ("weight", c_float),
        ("sets_condition", c_int32),
    )


class TextAcceptParams(Structure):
    """`text_accept_params` in csrc/text_accept_params.h."""

    _fields_ = _fields(
        "chosen choice guess guessed matched least eos limit bound text length finished hits tries turns_left ring counts "
        "proceed",
        ("graph_condition", c_uint64),
        ("room", c_int64),
        ("rows classes eos_count ring_turns sets_condition reserved", c_int32),
    )


PARAMS: dict[str, type[Structure]] = {
    "exit_router": ExitRouterParams,
    "take_tokens": TakeTokensParams,
    "loop_turn": LoopTurnParams,
    "exit_score": ExitScoreParams,
    "choose_token": ChooseTokenParams,
    "exit_join": ExitJoinParams,
    "exit_candidates": ExitCandidatesParams,
    "exit_gate": ExitGateParams,
    "exit_inputs": ExitInputsParams,
    "exit_merge": ExitMergeParams,
    "text_drafts": TextDraftsParams,
    "text_accept": TextAcceptParams,
}
