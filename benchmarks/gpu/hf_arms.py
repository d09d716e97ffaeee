"""HuggingFace's ways to decode on a GPU: eager with a growing cache, a captured CUDA graph over a static one, `torch.compile`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from benchmarks.gpu import cuda_timing

Decoded = tuple[list[list[int]], float]  # new tokens [B][T], and ms a token of those after the first


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def eager(model: Any, prompts: list[list[int]], new_tokens: int) -> Decoded:
    """What people call eager: one forward a token over a `DynamicCache`, attention by the model's default, SDPA."""
    ids, cache, tokens = torch.tensor(prompts, device=model.device), DynamicCache(config=model.config), list[Tensor]()
    begin = 0.0
    for number in range(new_tokens):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1:].argmax(-1)
        tokens.append(ids)
        if number == 0:
            wait(model.device.type)
            begin = time.perf_counter()
    wait(model.device.type)
    return torch.cat(tokens, 1).tolist(), 1e3 * (time.perf_counter() - begin) / (new_tokens - 1)


class StaticStep:
    """A decode step over tensors that stay where they are, so that it can be captured or compiled: `token`, `place`, a cache of
    ``slots``, and the mask of the slots that the token sees."""

    def __init__(self, model: Any, rows: int, slots: int, forward: Callable[..., Any] | None = None) -> None:
        self._model, self._forward = model, forward or model.forward
        self.cache = StaticCache(config=model.config, max_cache_len=slots)
        self.token = torch.zeros((rows, 1), device=model.device, dtype=torch.int64)
        self.place = torch.zeros((rows, 1), device=model.device, dtype=torch.int64)
        self._slots = torch.arange(slots, device=model.device)

    @torch.no_grad()
    def __call__(self) -> None:
        mask = (self._slots <= self.place[:, :, None])[:, None]
        logits = self._forward(
            input_ids=self.token, position_ids=self.place, attention_mask=mask, past_key_values=self.cache, use_cache=True
        ).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.place.add_(1)

    @torch.no_grad()
    def prefill(self, prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts, device=self._model.device)
        self.cache.reset()
        logits = self._model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.place.fill_(ids.shape[1])

    def decode(self, prompts: list[list[int]], new_tokens: int, run: Callable[[], None]) -> Decoded:
        """``run``: makes a step."""
        self.prefill(prompts)
        tokens = [self.token.clone()]
        wait(self._model.device.type)
        begin = time.perf_counter()
        for _ in range(new_tokens - 1):
            run()
            tokens.append(self.token.clone())
        wait(self._model.device.type)
        return torch.cat(tokens, 1).tolist(), 1e3 * (time.perf_counter() - begin) / (new_tokens - 1)


def captured(step: StaticStep, prompts: list[list[int]]) -> Callable[[], None]:
    """``step`` as a CUDA graph."""
    step.prefill(prompts)
    return cuda_timing.captured(step).replay


def compiled_forward(model: Any, backend: str = "inductor") -> Callable[..., Any]:
    """By `torch.compile` with CUDA graphs; another ``backend`` compiles nothing, for a dry run."""
    if backend != "inductor":
        return torch.compile(model.forward, dynamic=False, backend=backend)
    return torch.compile(model.forward, dynamic=False, mode="reduce-overhead")
