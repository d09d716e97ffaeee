"""Ways to decode on a GPU: HuggingFace eager and compiled, and TIDE's `full` and `exact` on a bundle, cut or not."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, cast

import torch
from tide_bench.arms.base import Timing
from tide_runtime import Engine, EngineOptions, GenerationParams
from tide_runtime.backends.device.device import Device
from transformers import PreTrainedModel, StaticCache

COMPILED = {"mode": "reduce-overhead"}  # `torch.compile` with CUDA graphs
Step = Callable[..., Any]


class DecodeArm(Protocol):
    """A loaded model."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Continue ``prompts`` [B][S], all of one length, greedily by ``new_tokens`` tokens."""

    def host_ms(self, prompts: list[list[int]], new_tokens: int) -> float | None:
        """Milliseconds of a step in which the host does not wait for the GPU; None where it is not counted."""

    def close(self) -> None:
        """Let go of the model; `release_memory` then gives its memory back."""


class TorchArm:
    """A greedy loop over a static cache.

    ``compile_options``: of `torch.compile` for the step, CUDA graphs by default; None: eager. The model goes back to host memory
    when the arm is closed.
    """

    def __init__(
        self, model: PreTrainedModel, slots: int, compile_options: Mapping[str, str] | None = None, device: str = "cuda"
    ) -> None:
        self._model, self._device = cast(Any, model).to(device), device
        self._wait = torch.get_device_module(device).synchronize
        # The same tensors each time: compiled code, and its CUDA graphs, are bound to them.
        self._cache = StaticCache(config=self._model.config, max_cache_len=slots)
        forward = self._model.forward
        self._step: Step = forward
        if compile_options is not None:
            torch.compiler.reset()  # code compiled for other models counts as recompiled, and after eight of them nothing is
            self._step = torch.compile(forward, dynamic=False, **compile_options)  # type: ignore[call-overload]

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        ids = torch.tensor(prompts, device=self._device)
        rows, length = ids.shape
        self._cache.reset()
        self._wait()
        start = perf_counter()
        logits = self._model(input_ids=ids, past_key_values=self._cache, logits_to_keep=1).logits
        tokens = [logits[:, -1:].argmax(-1)]
        self._wait()
        first = perf_counter()
        for place in range(length, length + new_tokens - 1):
            positions = torch.full((rows, 1), place, device=self._device)
            logits = self._step(input_ids=tokens[-1], position_ids=positions, past_key_values=self._cache).logits
            tokens.append(logits[:, -1:].argmax(-1).clone())
        self._wait()
        return Timing(torch.cat(tokens, 1).tolist(), first - start, perf_counter() - first)

    def host_ms(self, prompts: list[list[int]], new_tokens: int) -> float | None:
        return None

    def close(self) -> None:
        self._model.to("cpu")
        self._model = self._step = self._cache = cast(Any, None)


class TideArm:
    """``policy`` on ``target`` of the bundle in ``folder``, for ``rows`` sequences at once."""

    def __init__(self, folder: Path, target: str, rows: int, policy: str = "full") -> None:
        options = EngineOptions(target=target, policy=policy, max_batch=rows, verify=False)
        self._engine = Engine.load(folder, options)
        self._waited = WaitClock(cast(Any, self._engine.backend).device)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        begin = perf_counter()
        rows = self._engine.generate(prompts, GenerationParams(max_new_tokens=new_tokens, ignore_eos=True))
        wall, decode = perf_counter() - begin, min(row.stats.decode_time for row in rows)
        return Timing([list(row.token_ids) for row in rows], wall - decode, decode)

    def host_ms(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Milliseconds of a step, the prefill's share included."""
        self._waited.seconds, begin = 0.0, perf_counter()
        self.generate(prompts, new_tokens)
        return 1e3 * (perf_counter() - begin - self._waited.seconds) / new_tokens

    def close(self) -> None:
        self._engine.close()
        self._engine = cast(Any, None)


def release_memory() -> None:
    """Give back what arms that are closed, or could not be loaded, held on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()


class WaitClock:
    """Seconds that ``device``'s callers wait in `synchronize`."""

    def __init__(self, device: Device) -> None:
        self.seconds, self._wait = 0.0, device.synchronize
        device.synchronize = self._timed  # type: ignore[method-assign]

    def _timed(self) -> None:
        begin = perf_counter()
        self._wait()
        self.seconds += perf_counter() - begin
