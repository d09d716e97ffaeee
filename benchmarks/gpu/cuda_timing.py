"""How long work takes on the GPU: the median, in µs."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from tide_bench.arms.captured import captured
from tide_bench.arms.stopwatch import Stopwatch

_FLUSH_BYTES = 512 * 2**20  # more than any L2 cache: weights come from memory, as they do between decode steps
Work = Callable[[], object]


def gpu_time(work: Work, repeats: int = 100) -> float:
    """µs on the GPU of one replay of the captured work, with a cold L2 cache; includes a graph's launch on the device."""
    graph, flush = captured(work), torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    watch = Stopwatch("cuda")
    for _ in range(repeats):
        flush.zero_()
        watch.mark()
        graph.replay()
        watch.mark()
    return median(watch.seconds()[::2]) * 1e6
