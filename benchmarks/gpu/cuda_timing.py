"""How long work takes on the GPU, and how long a caller waits to have it queued. All medians, in µs."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

_FLUSH_BYTES = 512 * 2**20  # more than any L2 cache: weights come from memory, as they do between decode steps
Work = Callable[[], object]


def captured(work: Work) -> torch.cuda.CUDAGraph:
    """``work`` as a CUDA graph; it ran three times before, so that nothing is loaded or allocated while it is captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def gpu_time(work: Work, repeats: int = 100) -> float:
    """µs on the GPU of one replay of the captured work, with a cold L2 cache; includes a graph's launch on the device."""
    graph, flush = captured(work), torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in events) * 1e3


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
