"""The clock of arms that run by torch: events on a GPU's stream, the processor's clock elsewhere."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from typing import Any

import torch


class Stopwatch:
    """Notes moments of the work that is queued on ``device`` (``cpu``, ``cuda``, ``cuda:1``).

    On a GPU a call only queues work, so that the processor's clock would show how fast it is queued.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._marks = list[Any]()

    def mark(self) -> None:
        """The moment at which the work that was queued so far is done."""
        if self._device.type == "cpu":
            self._marks.append(perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Seconds between neighbouring marks; waits for the last one."""
        if self._device.type == "cpu":
            return [later - earlier for earlier, later in pairwise(self._marks)]
        self._marks[-1].synchronize()
        return [1e-3 * earlier.elapsed_time(later) for earlier, later in pairwise(self._marks)]
