"""Tokens of steps that the host drives, drawn on the device: one launch and one copy for all rows of a step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.device.arena import Arena
from tide_runtime.backends.device.control_flow import Enqueue
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.element_types import ElementType
from tide_runtime.device_loop.loop_kernels import ChooseToken, LoopKernels
from tide_runtime.device_loop.loop_state import LoopState
from tide_runtime.errors import TideError
from tide_runtime.sampler import Sampler


class _Prepared(NamedTuple):
    """A launch for a number of rows, whose logits are copied into ``arena`` first, as steps have them at many addresses."""

    state: LoopState
    arena: Arena
    enqueue: Enqueue
    tokens: NDArray[np.int64]


class DeviceRowSampling:
    """`RowSampling` over rows of ``vocab`` logits of type ``element``. Without a kernel the host draws, after a warning."""

    def __init__(self, device: Device, kernels: LoopKernels, element: ElementType, vocab: int) -> None:
        self._device = device
        self._kernels = kernels
        self._element = element
        self._vocab = vocab
        self._prepared: dict[int, _Prepared] = {}
        self._lock = Lock()  # of the prepared memory, for threads with contexts of their own
        self._refused = False

    def choose(self, pointer: int, samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
        rows = len(samplers)
        with self._lock:
            if not self._refused:
                try:
                    return self._choose(pointer, samplers, positions)
                except TideError as error:  # kernels are compiled when they are first prepared
                    self._refused = True
                    warnings.warn(f"{error}; the host draws sampled tokens", RuntimeWarning, stacklevel=2)
        return [-1] * rows

    def _choose(self, pointer: int, samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
        rows = len(samplers)
        with self._device.lock:
            self._device.use()
            state, arena, enqueue, tokens = self._prepare(1 << (rows - 1).bit_length())
            self._device.copy(arena.pointer, pointer, rows * self._vocab * self._element.bytes)
            state.send([position - 1 for position in positions], [0] * rows, [0] * rows, (), samplers)
            enqueue(self._device.stream)
            self._device.download(tokens, state.pointers["chosen"])
        self._device.synchronize()
        return tokens[:rows].tolist()

    def _prepare(self, rows: int) -> _Prepared:
        if rows not in self._prepared:
            state = LoopState(self._device, rows, turns=1)
            arena = Arena(self._device, {"logits": rows * self._vocab * self._element.bytes})
            choice = ChooseToken(arena.pointer, self._element, self._vocab, state.pointers["chosen"])
            tokens = self._device.pinned(8 * rows).view(np.int64)
            self._prepared[rows] = _Prepared(state, arena, self._kernels.choose_token(state, choice), tokens)
        return self._prepared[rows]
