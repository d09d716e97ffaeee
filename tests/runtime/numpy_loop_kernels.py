"""The kernels of loops on a device in NumPy: what `PluginLoopKernels` binds, with the references of conformance tests."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from runtime.simulated_gpu import SimulatedGpu
from tide_plugins import loop_kernels
from tide_plugins.loop_kernels import PluginLoopKernels, Prepare
from tide_plugins.reference import numpy_decode_loop, numpy_exact_loop
from tide_runtime.backends.device.control_flow import Condition, Enqueue
from tide_runtime.backends.device.element_types import ElementType

Tensors = dict[str, NDArray[Any]]
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
    """``doubt``: sampled tokens at multiples of this position are left to the host."""

    def __init__(self, gpu: SimulatedGpu, doubt: int = 0) -> None:
        self._gpu, self._doubt = gpu, doubt

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
        compute = getattr(numpy_decode_loop, kernel, None) or getattr(numpy_exact_loop, kernel)
        given = dict(tensors)
        if "position_ids32" in given:
            given.setdefault("position_ids", given["position_ids32"])
        if kernel == "exit_join":  # its last states are optional
            given.setdefault("last", np.zeros_like(given["states"][:, 0]))
        made = compute(given, **numbers)
        if kernel == "choose_token" and self._doubt:
            made["chosen"] = np.where(self._in_doubt(given), -1, made["chosen"])
        for name in made.keys() & tensors.keys():
            tensors[name][...] = made[name]

    def _in_doubt(self, given: Tensors) -> NDArray[np.bool_]:
        position = given["length"][:, None] + 1 + np.arange(len(given["chosen"]) // len(given["length"]))
        return np.ravel((given["temperature"][:, None] > 0) & (position % self._doubt == 0))
