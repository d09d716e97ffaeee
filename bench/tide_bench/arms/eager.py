"""HuggingFace transformers by default: ``model.generate``, fp32, all cores."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from tide_bench.arms.base import FEW_THREADS, Timing
from tide_bench.report import cores


def load_eager(folder: Path) -> PreTrainedModel:
    """The model in fp32 and eval mode, with end-of-sequence ids off, and torch on all cores or the few it is to begin with."""
    torch.set_num_threads(int(os.environ.get(FEW_THREADS, cores())))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0  # prompts have one length; without it `generate` requires one
    return model


class EagerArm:
    """`generate` with its default dynamic cache and SDPA attention."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model: Any = load_eager(folder)

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Timing:
        """``options``: more arguments of HF's ``generate``, such as its ways to draft."""
        ids, clock = torch.tensor(prompts), _Clock()
        start = perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=clock,
            **options,
        )
        tokens = output[:, ids.shape[1] :].tolist()
        # With drafts several tokens may come out first; the time of the others stands for all but one.
        later, decode_s = new_tokens - clock.counts[1] // len(prompts), clock.times[-1] - clock.times[1]
        return Timing(tokens, clock.times[1] - start, decode_s * (new_tokens - 1) / max(1, later))


class _Clock(BaseStreamer):
    """Records when tokens are generated, and how many: first the prompt, then one step of all sequences at a time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass
