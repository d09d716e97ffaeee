"""HuggingFace transformers with ``torch.compile``.

On a GPU: ``mode="reduce-overhead"``, which is CUDA graphs of compiled kernels.

On a CPU: the fastest setting found. Tried on the demo model, batch 1, ms a token (eager 6.5): `torch.compile` with a static cache
4.9; with inductor's ``cpp_wrapper`` 4.5; with ``freezing`` (weights packed ahead) 4.3; with both 3.1, which is what runs here.
Kernels and wrapper are compiled apart: 115 s instead of 180 for two batch sizes, at the same speed.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch._inductor.config as inductor
from transformers import PreTrainedModel, StaticCache

from tide_bench.arms.base import ArmDevice
from tide_bench.arms.static_cache import StaticCacheArm


class CompileArm(StaticCacheArm):
    """A greedy loop around the compiled forward pass of one token a sequence."""

    def __init__(self, folder: Path | PreTrainedModel, device: ArmDevice | None = None) -> None:
        super().__init__(folder, device)
        if self.device.is_gpu:
            self._step = torch.compile(self.model.forward, dynamic=False, mode="reduce-overhead")
            return
        inductor.freezing = True
        inductor.cpp_wrapper = True
        inductor.cpp_wrapper_build_separate = True
        self._step = torch.compile(self.model.forward, dynamic=False)

    def prepare(self, cache: StaticCache, rows: int, slots: int) -> None:
        """The first steps compile."""

    def decode(self, cache: StaticCache, token: torch.Tensor, position: int, steps: int) -> torch.Tensor:
        tokens = [token]
        for place in range(position, position + steps):
            positions = torch.full_like(token, place)
            logits = self._step(input_ids=tokens[-1], position_ids=positions, past_key_values=cache).logits
            tokens.append(logits[:, -1:].argmax(-1))  # a new tensor: the next step overwrites the logits
        return torch.cat(tokens[1:], 1)
