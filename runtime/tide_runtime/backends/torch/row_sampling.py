"""Drawing tokens on a GPU: the device finds the few that can win, and the host, whose arithmetic decides, looks at those only."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tide_runtime.backends.torch.stream import TorchStream
from tide_runtime.kept_tokens import TINY
from tide_runtime.row_sampling import LargestLogits, RaceLeaders

_LARGEST = 512  # logits; top-p = 0.95 of a language model seldom keeps more than a hundred
_LEADERS = 16  # of a race, in which rounding leaves few undecided
_RESULT_BYTES = 16 + 8 * _LARGEST


class TorchRowSampling:
    """`RowSampling` over rows of ``vocab_size`` logits of ``dtype`` in the memory of ``stream``'s device."""

    def __init__(self, stream: TorchStream, vocab_size: int, dtype: torch.dtype) -> None:
        self._stream, self._vocab_size, self._dtype = stream, vocab_size, dtype
        self._memory = stream.device.allocate(_RESULT_BYTES)
        self._found = stream.memory(self._memory.pointer, _RESULT_BYTES)
        self._host = stream.device.pinned(_RESULT_BYTES)
        self._lock = Lock()  # of this memory, for threads with contexts of their own

    def largest(self, pointer: int, temperature: float) -> LargestLogits:
        count = min(_LARGEST, self._vocab_size)

        def find(row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            values, ids = torch.topk(row, count)
            others = _weights(row, values[0], temperature).index_fill_(0, ids, 0.0)
            return ids, values, torch.stack((values[0].double(), others.sum(dtype=torch.float64)))

        ids, values, (_, others) = self._run(pointer, count, find)
        return LargestLogits(ids, values, float(others))

    def race(self, pointer: int, temperature: float, key: NDArray[np.uint64], position: int) -> RaceLeaders | None:
        kernels, count = self._stream.kernels, min(_LEADERS, self._vocab_size)
        if kernels is None:
            return None

        def find(row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            best = row.max()
            bounds = kernels.race_bounds(row, best, max(temperature, TINY), key.tolist(), position)
            least, ids = torch.topk(bounds, min(count + 1, self._vocab_size), largest=False)
            return ids[:count], row[ids[:count]], torch.stack((best, least[-1])).double()

        ids, values, (best, last) = self._run(pointer, count, find)
        return RaceLeaders(ids, values, np.float32(best), np.inf if count == self._vocab_size else float(last))

    def _run(
        self, pointer: int, count: int, find: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float64]]:
        """What ``find`` makes of the row at ``pointer``, as float32: ``count`` ids and values, its largest logit and a number."""
        device, found = self._stream.device, self._found
        row = self._stream.memory(pointer, self._vocab_size * self._dtype.itemsize).view(self._dtype)

        def work() -> None:
            ids, values, numbers = find(row.float())
            found[:16].view(torch.float64).copy_(numbers)
            found[16 : 16 + 4 * count].view(torch.int32).copy_(ids)
            found[16 + 4 * count : 16 + 8 * count].view(torch.float32).copy_(values)

        with self._lock:
            with device.lock:
                self._stream.run(work)
                device.download(self._host, self._memory.pointer)
            device.synchronize()
            made = self._host[: 16 + 8 * count].copy()
        ids, values = made[16 : 16 + 4 * count].view(np.int32), made[16 + 4 * count :].view(np.float32)
        return ids, values, made[:16].view(np.float64)


def _weights(row: Tensor, best: Tensor, temperature: float) -> Tensor:
    """`tide_runtime.kept_tokens.weights`."""
    return ((row - best) / max(temperature, TINY)).exp_()
