"""The kernels of a decode loop in NumPy, over addresses: what each must do, in the words of csrc/."""

import ctypes
import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from runtime.simulated_gpu import SimulatedGpu
from tide_plugins.reference import exact_loop
from tide_plugins.reference.decode_loop import choose_token
from tide_runtime.backends.device.program import Condition, Enqueue
from tide_runtime.depth.executor import max_probability
from tide_runtime.device_loop.loop_kernels import (
    ChooseToken,
    ExitCandidates,
    ExitGate,
    ExitInputs,
    ExitScore,
    ExitWindow,
    NextInputs,
)
from tide_runtime.device_loop.loop_state import MOST_EOS, LoopState
from tide_runtime.device_loop.text_state import RING_ENTRY, TextState
from tide_runtime.device_loop.token_ring import EXIT_UNIT, NO_TOKEN

RUNNING, EOS, LIMIT, NO_LOGITS = 0, 1, 2, 3


def memory(pointer: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Device memory as an array that shares it."""
    count_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(memoryview((ctypes.c_uint8 * count_bytes).from_address(pointer)).cast("B"), dtype).reshape(shape)


def counters(state: LoopState) -> NDArray[Any]:
    return memory(state.ring.pointers[1], state.ring.counts.shape, np.int64)


class Rows:
    """The state of a loop as arrays."""

    def __init__(self, state: LoopState) -> None:
        def rows(name: str, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
            return memory(state.pointers[name], shape or (state.batch_size,), dtype)

        self.length, self.last_token, self.limit = (rows(n, np.int64) for n in ("length", "last_token", "limit"))
        self.chosen, self.eos = rows("chosen", np.int64), rows("eos", np.int64, MOST_EOS)
        self.emitted, self.waiting = rows("emitted", np.int32), rows("waiting", np.int32, state.exits, state.batch_size)
        self.finished, self.exits = rows("finished", np.uint8), rows("exits", np.uint8)
        self.running, self.turns_left = rows("running", np.int32, 1), rows("turns_left", np.int32, 1)


def _store(arrays: dict[str, NDArray[Any]], made: dict[str, NDArray[Any]]) -> None:
    for name in made.keys() & arrays.keys():
        arrays[name][...] = made[name]


class NumpyLoopKernels:
    """``mutation``: the name of a rule to break, which a test must notice. ``doubt``: sampled tokens at multiples of this
    position are left to the host."""

    def __init__(self, gpu: SimulatedGpu, mutation: str = "", doubt: int = 0) -> None:
        self._gpu, self._mutation, self._doubt = gpu, mutation, doubt

    def take_tokens(self, state: LoopState, chosen: int) -> Enqueue:
        rows, tokens = Rows(state), memory(chosen, (state.batch_size,), np.int64)

        def take() -> None:
            rows.emitted[:] = 0
            for b in np.flatnonzero(rows.finished == RUNNING):
                if tokens[b] < 0:
                    rows.finished[b] = NO_LOGITS
                    continue
                rows.last_token[b] = tokens[b]
                rows.emitted[b] = 1
                if tokens[b] in rows.eos and self._mutation != "eos":
                    rows.finished[b] = EOS
                elif rows.length[b] + 2 >= rows.limit[b] and self._mutation != "limit":
                    rows.finished[b] = LIMIT
                rows.length[b] += 1
            rows.running[0] = (rows.finished == RUNNING).sum()

        return lambda stream: self._gpu.submit(stream, take)

    def turn(self, state: LoopState, inputs: NextInputs, slots: int) -> Enqueue:
        rows, written = Rows(state), counters(state)
        entries = memory(state.ring.pointers[0], state.ring.entries.shape, np.int64)

        def turn(handle: int | None) -> None:
            left = rows.exits * np.int64(EXIT_UNIT)
            entries[written[0] % len(entries)] = np.where(rows.emitted > 0, rows.last_token + left, NO_TOKEN)
            written[0] += 1
            rows.turns_left -= 1
            place = np.minimum(rows.length, slots - 1) if self._mutation != "mask" else rows.length
            given = {"input_ids": rows.last_token, "position_ids": place, "write_index": place, "seqlens_k": place}
            for name, pointer in inputs.pointers.items():
                memory(pointer, (state.batch_size,), inputs.types[name].host)[:] = given[name]
            proceed = rows.running[0] > 0 and (rows.turns_left[0] > 0 or self._mutation == "turns")
            self._set(state.proceed, handle, int(proceed))

        return self._deciding(state.proceed, turn)

    def exit_candidates(self, state: LoopState, candidates: ExitCandidates) -> Enqueue:
        rows, score, counts = Rows(state), memory(candidates.score, (state.batch_size,), np.float32), counters(state)
        condition = state.heads[candidates.number - 1]

        def decide(handle: int | None) -> None:
            chosen = rows.finished == RUNNING
            if candidates.number > 1 and self._mutation != "again":
                chosen &= rows.exits == 0
            if candidates.has_mlp and self._mutation != "mlp":
                chosen &= score >= np.float32(candidates.threshold)
            score[:] = np.where(chosen, score if candidates.has_mlp else 1, -1)
            wanted = chosen.any() and self._mutation != "heads"
            counts[state.exits + candidates.number] += wanted
            self._set(condition, handle, int(wanted))

        return self._deciding(condition, decide)

    def exit_score(self, state: LoopState, exit: ExitScore) -> Enqueue:
        logits = memory(exit.logits, (state.batch_size, exit.vocab), exit.element.host)
        token, score = memory(exit.token, (state.batch_size,), np.int64), memory(exit.score, (state.batch_size,), np.float32)

        def rate() -> None:
            score[:] = np.where((token >= 0) & (score >= 0), max_probability(logits), -1)

        return lambda stream: self._gpu.submit(stream, rate)

    def choose_token(self, state: LoopState, choice: ChooseToken) -> Enqueue:
        count = state.batch_size
        types = {"temperature": np.float32, "tail": np.float32, "min_p": np.float32, "top_k": np.int32, "length": np.int64}
        given = {name: memory(state.pointers[name], (count,), kind) for name, kind in types.items()}
        given |= {"key": memory(state.pointers["key"], (count, 2), np.uint64), "finished": Rows(state).finished}
        given["chosen"] = memory(choice.chosen, (count * choice.tokens,), np.int64)
        logits = memory(choice.logits, (count * choice.tokens, choice.vocab), choice.element.host)

        def choose() -> None:
            tokens = choose_token(given | {"logits": logits})["chosen"]
            position = given["length"][:, None] + 1 + np.arange(choice.tokens)
            doubted = (given["temperature"][:, None] > 0) & (position % (self._doubt or sys.maxsize) == 0)
            given["chosen"][:] = np.where(doubted.ravel(), -1, tokens)

        return lambda stream: self._gpu.submit(stream, choose)

    def exit_join(self, state: LoopState, window: ExitWindow) -> Enqueue:
        rows, bytes_ = Rows(state), window.row_bytes
        states = memory(window.states, (state.batch_size, window.arriving, bytes_), np.uint8)
        target = memory(window.window, (state.batch_size, window.width, bytes_), np.uint8)
        last = None if window.last is None else memory(window.last, (state.batch_size, bytes_), np.uint8)

        def join() -> None:
            for b, arrived in enumerate(self._arrivals(rows, window.number)):
                first = rows.waiting[window.number - 1, b]
                target[b, first : first + arrived] = states[b, :arrived]
                if last is not None and arrived:
                    last[b] = states[b, arrived - 1 if self._mutation != "last" else 0]

        return lambda stream: self._gpu.submit(stream, join)

    def exit_gate(self, state: LoopState, gate: ExitGate) -> Enqueue:
        rows, score = Rows(state), memory(gate.score, (state.batch_size,), np.float32)
        early, counts = memory(gate.exit_token, (state.batch_size,), np.int64), counters(state)
        here = gate.number - 1

        def decide(handle: int | None) -> None:
            active = rows.finished == RUNNING
            rows.waiting[here] += self._arrivals(rows, gate.number)
            if here:
                rows.waiting[here - 1] = 0
            else:
                rows.exits[:] = 0
            open_ = active & (rows.exits == 0) if self._mutation != "again" else active
            leaves = open_ & (score >= np.float32(gate.threshold))
            rows.exits[leaves], rows.chosen[leaves] = gate.number, early[leaves]
            everywhere = rows.waiting[here:].sum(0) if self._mutation != "elsewhere" else rows.waiting[here]
            forced = (everywhere == gate.width) | (rows.turns_left[0] == 1)
            in_doubt = (rows.chosen < 0) & (self._mutation != "shallow")
            deeper = active & ((rows.exits == 0) | in_doubt | (forced if self._mutation != "window" else False))
            counts[gate.number] += deeper.any()
            self._set(condition, handle, int(deeper.any()))

        condition = state.deeper[here]
        return self._deciding(condition, decide)

    def exit_inputs(self, state: LoopState, inputs: ExitInputs) -> Enqueue:
        rows, condition, batch = Rows(state), state.choices[inputs.number - 1], state.batch_size
        pending = memory(inputs.window, (batch, inputs.width, inputs.row_bytes), np.uint8)

        def write(handle: int | None) -> None:
            waiting = rows.waiting[inputs.number - 1]
            most = max([1, *waiting[rows.finished == RUNNING].tolist()])
            choice = (most - 1).bit_length() if self._mutation != "narrow" else 0
            tokens = 1 << choice
            some = np.clip(waiting, 1, tokens)
            first = np.minimum(rows.length + 1 - some, inputs.slots - tokens)
            given = {
                "write_index": first,
                "position_ids": first[:, None] + np.arange(tokens),
                "seqlens_k": first + tokens - 1,
                "logits_index": np.arange(batch) * tokens + some - 1,
            }
            memory(inputs.states, (batch, tokens, inputs.row_bytes), np.uint8)[...] = pending[:, :tokens]
            for name, pointer in inputs.inputs.pointers.items():
                memory(pointer, given[name].shape, inputs.inputs.types[name].host)[...] = given[name]
            self._set(condition, handle, choice)

        return self._deciding(condition, write)

    def text_drafts(self, state: LoopState, texts: TextState, inputs: NextInputs, slots: int) -> Enqueue:
        arrays, tokens = self._texts(state, texts), 1 << (texts.sizes - 1)
        for name, pointer in inputs.pointers.items():
            shape = (state.batch_size, tokens) if name in ("input_ids", "position_ids") else (state.batch_size,)
            arrays[name] = memory(pointer, shape, inputs.types[name].host)

        def write(handle: int | None) -> None:
            made = exact_loop.text_drafts(arrays, slots, texts.drafts.limit, texts.drafts.weight)
            if self._mutation == "drafts":  # that nothing copies
                made["guess"][:] = 0
            _store(arrays, made)
            self._set(texts.choice, handle, int(made["choice"][0]))

        return self._deciding(texts.choice, write)

    def text_accept(self, state: LoopState, texts: TextState, chosen: int) -> Enqueue:
        arrays, tokens = self._texts(state, texts), 1 << (texts.sizes - 1)
        arrays["chosen"] = memory(chosen, (state.batch_size, tokens), np.int64)
        arrays["ring"] = memory(state.ring.pointers[0], (state.ring.turns, state.batch_size, RING_ENTRY), np.int64)
        arrays["counts"] = counters(state)

        def write(handle: int | None) -> None:
            given = dict(arrays)
            if self._mutation == "accept":  # what is not the model's
                given["chosen"] = np.where(arrays["chosen"] < 0, arrays["chosen"], arrays["chosen"] % 7)
            if self._mutation == "bound":
                given["bound"] = np.full(state.batch_size, 1 << 40)
            made = exact_loop.text_accept(given)
            _store(arrays, made)
            self._set(state.proceed, handle, int(made["proceed"][0]))

        return self._deciding(state.proceed, write)

    @staticmethod
    def _texts(state: LoopState, texts: TextState) -> dict[str, NDArray[Any]]:
        rows = Rows(state)
        arrays = {name: memory(texts.pointers[name], *shape_and_type) for name, shape_and_type in texts.tensors.items()}
        named = {name: getattr(rows, name) for name in ("length", "limit", "finished", "eos", "turns_left")}
        return arrays | named | {"proceed": memory(state.pointers["proceed"], (1,), np.int32)}

    def exit_merge(self, state: LoopState, deep_token: int) -> Enqueue:
        rows, deep = Rows(state), memory(deep_token, (state.batch_size,), np.int64)

        def merge() -> None:
            rows.chosen[:] = np.where(rows.exits == 0, deep, rows.chosen)
            rows.waiting[-1] = 0

        return lambda stream: self._gpu.submit(stream, merge)

    def _arrivals(self, rows: Rows, number: int) -> NDArray[Any]:
        return (rows.finished == RUNNING).astype(np.int32) if number == 1 else rows.waiting[number - 2].copy()

    def _deciding(self, condition: Condition, kernel: Any) -> Enqueue:
        def enqueue(stream: int) -> None:
            handle = condition.handle  # as a launch's arguments hold it
            self._gpu.submit(stream, lambda: kernel(handle))

        return enqueue

    def _set(self, condition: Condition, handle: int | None, value: int) -> None:
        memory(condition.flag, (1,), np.int32)[0] = value
        if handle is not None:
            self._gpu.set_condition(handle, value)
