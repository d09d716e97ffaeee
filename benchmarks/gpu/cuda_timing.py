"""How long work takes on the GPU, and how long a caller waits to have it queued. All medians, in µs."""

from __future__ import annotations

import time
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


def call_time(work: Work, repeats: int = 200, rounds: int = 5) -> float:
    """µs per call from Python, warm, calls queued back to back: the larger of what the caller and what the GPU needs."""
    work()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / repeats)
    return median(times) * 1e6
