"""Ways to decode on a GPU: HuggingFace eager and compiled, and TIDE's `full` on a bundle, cut or not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
from tide_bench.arms.base import Timing
from tide_runtime import Engine, EngineOptions, GenerationParams
from tide_runtime.cuda.device import Device
from transformers import PreTrainedModel, StaticCache

Step = Callable[..., Any]


class TorchArm:
    """A greedy loop over a static cache on the GPU; ``compiled``: `torch.compile` with CUDA graphs for the step."""

    def __init__(self, model: PreTrainedModel, slots: int, compiled: bool) -> None:
        self._model = cast(Any, model).to("cuda")
        self._slots = slots
        forward = self._model.forward
        self._step: Step = torch.compile(forward, mode="reduce-overhead", dynamic=False) if compiled else forward

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        ids = torch.tensor(prompts, device="cuda")
        rows, length = ids.shape
        cache = StaticCache(config=self._model.config, max_cache_len=self._slots)
        start = perf_counter()
        logits = self._model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        tokens = [logits[:, -1:].argmax(-1)]
        torch.cuda.synchronize()
        first = perf_counter()
        for place in range(length, length + new_tokens - 1):
            positions = torch.full((rows, 1), place, device="cuda")
            logits = self._step(input_ids=tokens[-1], position_ids=positions, past_key_values=cache).logits
            tokens.append(logits[:, -1:].argmax(-1).clone())
        torch.cuda.synchronize()
        return Timing(torch.cat(tokens, 1).tolist(), first - start, perf_counter() - first)

    def close(self) -> None:
        self._model = self._step = cast(Any, None)
        gc.collect()
        torch.cuda.empty_cache()


class TideArm:
    """Policy `full` on ``target`` of the bundle in ``folder``, for ``rows`` rows at once."""

    def __init__(self, folder: Path, target: str, rows: int) -> None:
        options = EngineOptions(target=target, policy="full", max_batch=rows, verify=False)
        self._engine = Engine.load(folder, options)
        self._waited = WaitClock(cast(Any, self._engine.backend).device)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        begin = perf_counter()
        rows = self._engine.generate(prompts, GenerationParams(max_new_tokens=new_tokens, ignore_eos=True))
        wall, decode = perf_counter() - begin, min(row.stats.decode_time for row in rows)
        return Timing([list(row.token_ids) for row in rows], wall - decode, decode)

    def host_ms(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Milliseconds of a step in which the host does not wait for the GPU, prefill included."""
        self._waited.seconds, begin = 0.0, perf_counter()
        self.generate(prompts, new_tokens)
        return 1e3 * (perf_counter() - begin - self._waited.seconds) / new_tokens

    def close(self) -> None:
        self._engine.close()
        self._engine = cast(Any, None)
        gc.collect()


class WaitClock:
    """Seconds that ``device``'s callers wait in `synchronize`."""

    def __init__(self, device: Device) -> None:
        self.seconds, self._wait = 0.0, device.synchronize
        device.synchronize = self._timed  # type: ignore[method-assign]

    def _timed(self) -> None:
        begin = perf_counter()
        self._wait()
        self.seconds += perf_counter() - begin
