"""A greedy loop of a HuggingFace model over a static cache: what compiled steps and captured ones have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache

from tide_bench.arms.base import ArmDevice, Timing
from tide_bench.arms.eager import load_eager
from tide_bench.arms.stopwatch import Stopwatch


class StaticCacheArm(ABC):
    """The prompt is run as it is, because its length changes from call to call; a subclass runs the steps of one token.

    The cache is as short as the generation, as its attention pays for every slot.
    """

    def __init__(self, folder: Path | PreTrainedModel, device: ArmDevice | None = None) -> None:
        self.folder = folder
        self.device = device or ArmDevice()
        self.model: Any = load_eager(folder, self.device)
        self._caches: dict[tuple[int, int], StaticCache] = {}

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Timing:
        ids = torch.tensor(prompts, device=self.device.name)
        rows, length = ids.shape
        cache = self._cache(rows, length + new_tokens)
        self.prepare(cache, rows, length + new_tokens)
        cache.reset()
        watch = Stopwatch(self.device.name)
        watch.mark()
        logits = self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        first = logits[:, -1:].argmax(-1)
        watch.mark()
        later = self.decode(cache, first, length, new_tokens - 1)
        watch.mark()
        first_token_s, decode_s = watch.seconds()
        return Timing(torch.cat([first, later], 1).tolist(), first_token_s, decode_s)

    @abstractmethod
    def prepare(self, cache: StaticCache, rows: int, slots: int) -> None:
        """What a cache needs once, and what is not timed; it may write into the cache."""

    @abstractmethod
    def decode(self, cache: StaticCache, token: torch.Tensor, position: int, steps: int) -> torch.Tensor:
        """The ``steps`` tokens [B, steps] after ``token`` [B, 1], which stands at ``position``."""

    def _cache(self, rows: int, slots: int) -> StaticCache:
        """The same tensors each time: compiled code and graphs are bound to them."""
        if (rows, slots) not in self._caches:
            self._caches[rows, slots] = StaticCache(config=self.model.config, max_cache_len=slots)
        return self._caches[rows, slots]
