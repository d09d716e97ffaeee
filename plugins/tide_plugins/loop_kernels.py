"""The kernels of a decode loop, compiled from csrc. The runtime finds `load` by its entry point, ``loop_kernels``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tide_runtime.backends.device.control_flow import Condition, Enqueue
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.element_types import BF16, FP16, FP32, INT32
from tide_runtime.device_loop.loop_kernels import (
    ChooseToken,
    ExitCandidates,
    ExitGate,
    ExitInputs,
    ExitScore,
    ExitWindow,
    NextInputs,
)
from tide_runtime.device_loop.loop_state import LoopState
from tide_runtime.device_loop.text_state import RING_ENTRY, TextState

from tide_plugins.launch.cuda_driver import CudaDriver
from tide_plugins.launch.decode_loop_launch import (
    CANDIDATE_TENSORS,
    CHOOSE_TENSORS,
    GATE_TENSORS,
    INPUT_TENSORS,
    JOIN_TENSORS,
    MERGE_TENSORS,
    TAKE_TENSORS,
    TURN_TENSORS,
    prepare_choose_token,
    prepare_exit_candidates,
    prepare_exit_gate,
    prepare_exit_inputs,
    prepare_exit_join,
    prepare_exit_merge,
    prepare_exit_score,
    prepare_loop_turn,
    prepare_take_tokens,
)
from tide_plugins.launch.device_array import DeviceArray
from tide_plugins.launch.exact_loop_launch import ACCEPT_TENSORS, DRAFT_TENSORS, prepare_text_accept, prepare_text_drafts
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.launch.tensor_contract import Tensor

Prepare = Callable[..., Any]
_DTYPES = {FP32: "f32", FP16: "f16", BF16: "bf16"}
_NUMBERS = {np.int32: "i32", np.int64: "i64", np.float32: "f32", np.uint64: "u64", np.uint8: "u8"}


def load(device: Device) -> PluginLoopKernels:
    """Kernels for the GPU of ``device``, compiled on first use. Raises TideError when its architecture is not supported."""
    return PluginLoopKernels(KernelLibrary(CudaDriver(device.ordinal)), device.stream)


class PluginLoopKernels:
    """`LoopKernels` from ``library``; ``stream``: the device's stream, on which scratch memory is allocated."""

    def __init__(self, library: KernelLibrary, stream: int) -> None:
        self._library, self._stream = library, stream

    @property
    def conditions_refused(self) -> str | None:
        """Reason why these kernels cannot set CUDA graph conditions, or None."""
        return self._library.conditions_refused

    def take_tokens(self, state: LoopState, chosen: int) -> Enqueue:
        tensors = self._tensors(TAKE_TENSORS, state) | {"chosen": self._array(chosen, "i64", state.batch_size)}
        return self._prepared(prepare_take_tokens, tensors)

    def turn(self, state: LoopState, inputs: NextInputs, slots: int) -> Enqueue:
        tensors = self._tensors(TURN_TENSORS, state) | self._input_tensors(inputs, (state.batch_size,))
        return self._with_graph_condition(prepare_loop_turn, state.proceed, tensors, slots=slots)

    def exit_candidates(self, state: LoopState, candidates: ExitCandidates) -> Enqueue:
        condition = state.heads[candidates.number - 1]
        tensors = self._tensors(CANDIDATE_TENSORS, state) | {
            "score": self._array(candidates.score, "f32", state.batch_size),
            "wanted": self._array(condition.flag, "i32"),
        }
        numbers = {"number": candidates.number, "threshold": candidates.threshold, "has_mlp": candidates.has_mlp}
        return self._with_graph_condition(prepare_exit_candidates, condition, tensors, exit_count=state.exits, **numbers)

    def exit_score(self, state: LoopState, early_exit: ExitScore) -> Enqueue:
        score = self._array(early_exit.score, "f32", state.batch_size)
        tensors = {
            "logits": self._array(early_exit.logits, _DTYPES[early_exit.element], state.batch_size, early_exit.vocab),
            "token": self._array(early_exit.token, "i64", state.batch_size),
            "mlp_score": score,  # -1 for sequences that are no candidates
            "score": score,
        }
        return self._prepared(prepare_exit_score, tensors, mlp_threshold=0.0)

    def choose_token(self, state: LoopState, choice: ChooseToken) -> Enqueue:
        rows = state.batch_size * choice.tokens
        tensors = self._tensors(CHOOSE_TENSORS, state) | {
            "logits": self._array(choice.logits, _DTYPES[choice.element], rows, choice.vocab),
            "chosen": self._array(choice.chosen, "i64", rows),
        }
        return self._prepared(prepare_choose_token, tensors)

    def exit_join(self, state: LoopState, window: ExitWindow) -> Enqueue:
        tensors = self._tensors(JOIN_TENSORS, state) | {
            "states": self._array(window.states, "u8", state.batch_size, window.arriving, window.row_bytes),
            "window": self._array(window.window, "u8", state.batch_size, window.width, window.row_bytes),
        }
        if window.last is not None:
            tensors["last"] = self._array(window.last, "u8", state.batch_size, window.row_bytes)
        return self._prepared(prepare_exit_join, tensors, number=window.number)

    def exit_gate(self, state: LoopState, gate: ExitGate) -> Enqueue:
        deeper = state.deeper[gate.number - 1]
        tensors = self._tensors(GATE_TENSORS, state) | {
            "score": self._array(gate.score, "f32", state.batch_size),
            "exit_token": self._array(gate.exit_token, "i64", state.batch_size),
            "deeper": self._array(deeper.flag, "i32"),
        }
        numbers = {"threshold": gate.threshold, "number": gate.number, "width": gate.width}
        return self._with_graph_condition(prepare_exit_gate, deeper, tensors, **numbers)

    def exit_inputs(self, state: LoopState, inputs: ExitInputs) -> Enqueue:
        choice = state.choices[inputs.number - 1]
        places = (state.batch_size, inputs.width)
        tensors = self._tensors(INPUT_TENSORS, state) | self._input_tensors(inputs.inputs, places)
        tensors |= {
            "window": self._array(inputs.window, "u8", *places, inputs.row_bytes),
            "states": self._array(inputs.states, "u8", *places, inputs.row_bytes),
            "choice": self._array(choice.flag, "i32"),
        }
        return self._with_graph_condition(prepare_exit_inputs, choice, tensors, slots=inputs.slots, number=inputs.number)

    def text_drafts(self, state: LoopState, texts: TextState, inputs: NextInputs, slots: int) -> Enqueue:
        tensors = self._tensors(DRAFT_TENSORS, state, texts)
        tensors |= self._input_tensors(inputs, (state.batch_size, 1 << (texts.sizes - 1)))
        numbers = {"slots": slots, "draft_limit": texts.drafts.limit, "weight": texts.drafts.weight}
        return self._with_graph_condition(prepare_text_drafts, texts.choice, tensors, **numbers)

    def text_accept(self, state: LoopState, texts: TextState, chosen: int) -> Enqueue:
        tensors = self._tensors(ACCEPT_TENSORS, state, texts) | {
            "chosen": self._array(chosen, "i64", state.batch_size, 1 << (texts.sizes - 1)),
            "ring": self._array(state.pointers["ring"], "i64", state.ring.turns, state.batch_size, RING_ENTRY),
        }
        return self._with_graph_condition(prepare_text_accept, state.proceed, tensors)

    def exit_merge(self, state: LoopState, deep_token: int) -> Enqueue:
        tensors = self._tensors(MERGE_TENSORS, state) | {"deep_token": self._array(deep_token, "i64", state.batch_size)}
        return self._prepared(prepare_exit_merge, tensors)

    def _prepared(self, prepare: Prepare, tensors: dict[str, Any], **numbers: Any) -> Enqueue:
        launch = prepare(self._library, stream=self._stream, **tensors, **numbers)
        return lambda stream: launch.enqueue(stream)

    def _with_graph_condition(self, prepare: Prepare, condition: Condition, tensors: dict[str, Any], **numbers: Any) -> Enqueue:
        """A kernel that sets ``condition``, whose handle is read when it is queued, because every graph has its own."""
        launch = prepare(self._library, stream=self._stream, **tensors, **numbers)

        def enqueue(stream: int) -> None:
            (launch if condition.handle is None else launch.with_condition(condition.handle)).enqueue(stream)

        return enqueue

    def _tensors(self, contract: Sequence[Tensor], *states: LoopState | TextState) -> dict[str, Any]:
        """The tensors of ``contract`` that ``states`` hold, the last one first."""
        holders = {one.name: state for state in states for one in contract if one.name in state.tensors}
        layouts = {name: (state.pointers[name], *state.tensors[name]) for name, state in holders.items()}
        return {name: self._array(pointer, _NUMBERS[dtype], *shape) for name, (pointer, shape, dtype) in layouts.items()}

    def _input_tensors(self, inputs: NextInputs, windows: tuple[int, ...]) -> dict[str, Any]:
        """The next inputs by the kernels' tensor names, in which 32-bit variants end in 32."""
        tensors = {}
        for name, pointer in inputs.pointers.items():
            narrow = inputs.types[name] is INT32
            shape = windows if name in ("input_ids", "position_ids") else windows[:1]
            key = f"{name}32" if narrow and name != "seqlens_k" else name
            tensors[key] = self._array(pointer, "i32" if narrow else "i64", *shape)
        return tensors

    def _array(self, pointer: int, dtype: str, *shape: int) -> Any:
        return DeviceArray(pointer, shape, dtype, self._library.driver.device)
