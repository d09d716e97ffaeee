"""HuggingFace transformers with ``torch.compile``: the fastest setting found for a CPU.

Tried on the demo model, batch 1, ms a token (eager 6.5): `torch.compile` with a static cache 4.9; with inductor's
``cpp_wrapper`` 4.5; with ``freezing`` (weights packed ahead) 4.3; with both 3.1, which is what runs here. Kernels and
wrapper are compiled apart: 115 s instead of 180 for two batch sizes, at the same speed. The prompt is run uncompiled: its
length changes from call to call. The static cache is as short as the generation, as its attention pays for every slot.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch._inductor.config as inductor
from transformers import StaticCache

from tide_bench.arms.base import Timing
from tide_bench.arms.eager import load_eager


class CompileArm:
    """A greedy loop around the compiled forward pass of one token a sequence."""

    def __init__(self, folder: Path) -> None:
        inductor.freezing = True
        inductor.cpp_wrapper = True
        inductor.cpp_wrapper_build_separate = True
        self._model = load_eager(folder)
        self._step = torch.compile(self._model.forward, dynamic=False)
        self._caches: dict[tuple[int, int], StaticCache] = {}

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Timing:
        ids = torch.tensor(prompts)
        rows, length = ids.shape
        cache = self._empty_cache(rows, length + new_tokens)
        start = perf_counter()
        logits = self._model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        tokens = [logits[:, -1:].argmax(-1)]
        first = perf_counter()
        for position in range(length, length + new_tokens - 1):
            positions = torch.full((rows, 1), position)
            logits = self._step(input_ids=tokens[-1], position_ids=positions, past_key_values=cache).logits
            tokens.append(logits[:, -1:].argmax(-1))
        end = perf_counter()
        return Timing(torch.cat(tokens, 1).tolist(), first - start, end - first)

    def _empty_cache(self, rows: int, slots: int) -> StaticCache:
        """The same tensors each time: compiled code is bound to them."""
        key = (rows, slots)
        if key not in self._caches:
            self._caches[key] = StaticCache(config=self._model.config, max_cache_len=slots)
        self._caches[key].reset()
        return self._caches[key]
