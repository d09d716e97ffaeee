"""Work of torch on a GPU as a CUDA graph, which is captured by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARM_UPS = 3  # PyTorch's documentation, "CUDA graphs": libraries and workspaces are loaded before a capture


def captured(work: Callable[[], object], device: str = "cuda") -> torch.cuda.CUDAGraph:
    """The graph of what one call of ``work`` queues; it is called a few times before."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    return graph
