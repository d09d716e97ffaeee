"""The kernels of loops on a device in NumPy: what `PluginLoopKernels` binds, with the references of conformance tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from runtime.simulated_gpu import SimulatedGpu
from tide_plugins import loop_kernels
from tide_plugins.loop_kernels import PluginLoopKernels, Prepare
from tide_plugins.reference import decode_loop, exact_loop
from tide_runtime.backends.device.element_types import ElementType
from tide_runtime.backends.device.program import Condition, Enqueue

Tensors = dict[str, NDArray[Any]]
Compute = Callable[..., Tensors]
FP64 = ElementType("fp64", 11, np.float64)
loop_kernels._DTYPES[FP64] = "f64"  # logits of the tiny transformer
HOST = {
    "f64": np.float64,
    "f32": np.float32,
    "f16": np.float16,
    "i64": np.int64,
    "i32": np.int32,
    "u64": np.uint64,
    "u8": np.uint8,
}


def memory(pointer: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Device memory as an array that shares it."""
    count_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(memoryview((ctypes.c_uint8 * count_bytes).from_address(pointer)).cast("B"), dtype).reshape(shape)


class NumpyLoopKernels(PluginLoopKernels):
    """``mutation``: the name of a rule to break, which a test must notice. ``doubt``: sampled tokens at multiples of this
    position are left to the host."""

    def __init__(self, gpu: SimulatedGpu, mutation: str = "", doubt: int = 0) -> None:
        self._gpu, self._doubt = gpu, doubt
        self._broken, self._mutate = MUTATIONS[mutation] if mutation else ((), None)

    def _array(self, pointer: int, dtype: str, *shape: int) -> NDArray[Any]:
        return memory(pointer, shape or (1,), HOST[dtype])

    def _prepared(self, prepare: Prepare, tensors: Tensors, **numbers: Any) -> Enqueue:
        return lambda stream: self._gpu.submit(stream, lambda: self._run(prepare, tensors, numbers))

    def _with_graph_condition(self, prepare: Prepare, condition: Condition, tensors: Tensors, **numbers: Any) -> Enqueue:
        def enqueue(stream: int) -> None:
            handle = condition.handle  # as a launch's arguments hold it

            def run() -> None:
                self._run(prepare, tensors, numbers)
                if handle is not None:
                    self._gpu.set_condition(handle, int(memory(condition.flag, (1,), np.int32)[0]))

            self._gpu.submit(stream, run)

        return enqueue

    def _run(self, prepare: Prepare, tensors: Tensors, numbers: dict[str, Any]) -> None:
        kernel = prepare.__name__.removeprefix("prepare_")
        compute: Compute = getattr(decode_loop, kernel, None) or getattr(exact_loop, kernel)
        given = dict(tensors)
        if "position_ids32" in given:
            given.setdefault("position_ids", given["position_ids32"])
        if kernel == "exit_join":  # its last states are optional
            given.setdefault("last", np.zeros_like(given["states"][:, 0]))
        made = self._mutate(compute, given, numbers) if self._mutate and kernel in self._broken else compute(given, **numbers)
        if kernel == "choose_token" and self._doubt:
            made["chosen"] = np.where(self._in_doubt(given), -1, made["chosen"])
        for name in made.keys() & tensors.keys():
            tensors[name][...] = made[name]

    def _in_doubt(self, given: Tensors) -> NDArray[np.bool_]:
        position = given["length"][:, None] + 1 + np.arange(len(given["chosen"]) // len(given["length"]))
        return np.ravel((given["temperature"][:, None] > 0) & (position % self._doubt == 0))


def giving(**changes: Any) -> Callable[[Compute, Tensors, dict[str, Any]], Tensors]:
    """A kernel that is given other tensors or numbers: values, or functions of what it is given."""

    def mutate(compute: Compute, given: Tensors, numbers: dict[str, Any]) -> Tensors:
        other = {name: change(given) if callable(change) else change for name, change in changes.items()}
        return compute(
            given | {name: other[name] for name in other if name not in numbers},
            **numbers | {name: other[name] for name in other if name in numbers},
        )

    return mutate


def making(**changes: Callable[[Tensors], Any]) -> Callable[[Compute, Tensors, dict[str, Any]], Tensors]:
    """A kernel that makes other tensors of what it is given."""
    return lambda compute, given, numbers: compute(given, **numbers) | {n: change(given) for n, change in changes.items()}


def _elsewhere(compute: Compute, given: Tensors, numbers: dict[str, Any]) -> Tensors:
    """Tokens that wait at later exits do not count as waiting."""
    here = given["waiting"].copy()
    here[numbers["number"] :] = 0
    made = compute(given | {"waiting": here}, **numbers)
    made["waiting"][numbers["number"] :] = given["waiting"][numbers["number"] :]
    return made


def _shallow(compute: Compute, given: Tensors, numbers: dict[str, Any]) -> Tensors:
    """A token in doubt does not take its row through the other layers."""
    sure = compute(given | {name: np.maximum(given[name], 0) for name in ("chosen", "exit_token")}, **numbers)
    return compute(given, **numbers) | {name: sure[name] for name in ("deeper", "counts")}


# Rule → the kernels that break it, and how.
MUTATIONS: dict[str, tuple[tuple[str, ...], Callable[..., Tensors]]] = {
    "eos": (("take_tokens",), giving(eos=np.full(8, -1))),
    "limit": (("take_tokens",), giving(limit=np.int64(1 << 40))),
    "mask": (("loop_turn",), giving(slots=1 << 30)),
    "turns": (("loop_turn",), making(proceed=lambda given: given["running"] > 0)),
    "mlp": (("exit_candidates",), giving(has_mlp=False)),
    "heads": (("exit_candidates",), making(wanted=lambda given: False)),
    "again": (("exit_candidates", "exit_gate"), giving(exits=lambda given: np.zeros_like(given["exits"]))),
    "last": (("exit_join",), making(last=lambda given: given["states"][:, 0])),
    "window": (("exit_gate",), giving(turns_left=99, width=99)),
    "elsewhere": (("exit_gate",), _elsewhere),
    "shallow": (("exit_gate",), _shallow),
    "narrow": (("exit_inputs",), giving(waiting=lambda given: np.minimum(given["waiting"], 1))),
    "drafts": (("text_drafts",), lambda compute, given, numbers: _without_copies(compute(given, **numbers))),
    "accept": (
        ("text_accept",),
        giving(chosen=lambda given: np.where(given["chosen"] < 0, given["chosen"], given["chosen"] % 7)),
    ),
    "bound": (("text_accept",), giving(bound=lambda given: np.full_like(given["bound"], 1 << 40))),
}


def _without_copies(made: Tensors) -> Tensors:
    return made | {"guess": np.zeros_like(made["guess"])}
