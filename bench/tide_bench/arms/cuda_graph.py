"""HuggingFace transformers in a CUDA graph that is captured by hand: the model's own kernels without their launches.

Eager decoding on a GPU waits for Python, so a ratio over it says little of a GPU. This arm is the fair baseline: a step, with the
choice of its token, is one replay.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache

from tide_bench.arms.base import ArmDevice
from tide_bench.arms.process import ArmError
from tide_bench.arms.static_cache import StaticCacheArm

_WARM_UPS = 3  # PyTorch's documentation, "CUDA graphs": libraries and workspaces are loaded before a capture


class CudaGraphArm(StaticCacheArm):
    """One graph for each batch size and cache length; on a processor, which has no graphs, steps run as they are."""

    def __init__(self, folder: Path | PreTrainedModel, device: ArmDevice | None = None) -> None:
        super().__init__(folder, device)
        self._steps: dict[StaticCache, tuple[Callable[[], None], StaticStep]] = {}

    def prepare(self, cache: StaticCache, rows: int, slots: int) -> None:
        if cache in self._steps:
            return
        step = StaticStep(self.model, cache, rows, slots, self.device.name)
        self._steps[cache] = _captured(step, self.device.name).replay if self.device.is_gpu else step, step

    def decode(self, cache: StaticCache, token: torch.Tensor, position: int, steps: int) -> torch.Tensor:
        run, step = self._steps[cache]
        step.begin(token, position)
        for _ in range(steps):
            run()
        return step.written(steps)


class StaticStep:
    """A step on tensors that stay where they are: it reads its token and position from them, and writes the next ones there.

    Raises ArmError for models with sliding windows: their caches count positions in Python, which a graph would freeze.
    """

    def __init__(self, model: Any, cache: StaticCache, rows: int, slots: int, device: str) -> None:
        if any(cache.is_sliding):
            raise ArmError("its sliding windows count positions in Python, which a CUDA graph would repeat")
        self._model, self._cache = model, cache
        self._ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(rows, slots, dtype=torch.int64, device=device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)  # column of `_tokens`

    def begin(self, token: torch.Tensor, position: int) -> None:
        """Start from ``token`` [B, 1] at ``position``, behind what the cache holds."""
        self._ids.copy_(token)
        self._positions.fill_(position)
        self._next.zero_()

    def __call__(self) -> None:
        logits = self._model(input_ids=self._ids, position_ids=self._positions, past_key_values=self._cache).logits
        self._ids.copy_(logits[:, -1:].argmax(-1))
        self._tokens.index_copy_(1, self._next, self._ids)
        self._positions.add_(1)
        self._next.add_(1)

    def written(self, steps: int) -> torch.Tensor:
        """The tokens of the ``steps`` steps since `begin`, [B, steps]."""
        return self._tokens[:, :steps]


def _captured(work: Callable[[], object], device: str) -> torch.cuda.CUDAGraph:
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
