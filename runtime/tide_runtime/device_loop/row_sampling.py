"""Tokens of steps that the host drives, drawn on the device: one kernel and one copy for all rows of a step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.element_types import ElementType
from tide_runtime.backends.device.program import Enqueue
from tide_runtime.device_loop.loop_kernels import ChooseToken, LoopKernels
from tide_runtime.device_loop.loop_state import LoopState
from tide_runtime.errors import TideError
from tide_runtime.sampler import Sampler

_MOST_PREPARED = 64  # steps of so many shapes


class DeviceRowSampling:
    """`RowSampling` over rows of ``vocab`` logits of type ``element``."""

    def __init__(self, device: Device, kernels: LoopKernels, element: ElementType, vocab: int) -> None:
        self._device, self._kernels, self._element, self._vocab = device, kernels, element, vocab
        self._prepared: dict[tuple[int, int], tuple[LoopState, Enqueue, NDArray[np.int64]]] = {}
        self._lock = Lock()  # of the prepared memory, for threads with contexts of their own
        self._refused = False

    def choose(self, pointer: int, samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
        rows = len(samplers)
        with self._lock:
            if self._refused:
                return [-1] * rows
            with self._device.lock:
                self._device.use()
                try:
                    state, enqueue, chosen = self._prepare(pointer, rows)
                except TideError as error:  # kernels are compiled when they are first prepared
                    self._refused = True
                    warnings.warn(f"{error}; the host draws sampled tokens", RuntimeWarning, stacklevel=2)
                    return [-1] * rows
                state.send([position - 1 for position in positions], [0] * rows, [0] * rows, (), samplers)
                enqueue(self._device.stream)
                self._device.download(chosen, state.pointers["chosen"])
            self._device.synchronize()
            return chosen.tolist()

    def _prepare(self, pointer: int, rows: int) -> tuple[LoopState, Enqueue, NDArray[np.int64]]:
        if (pointer, rows) not in self._prepared:
            if len(self._prepared) == _MOST_PREPARED:
                self._prepared.clear()
            state = LoopState(self._device, rows, turns=1)
            choice = ChooseToken(pointer, self._element, self._vocab, state.pointers["chosen"])
            chosen = self._device.pinned(8 * rows).view(np.int64)
            self._prepared[pointer, rows] = state, self._kernels.choose_token(state, choice), chosen
        return self._prepared[pointer, rows]
