"""HuggingFace transformers by default: ``model.generate``; on a processor in fp32 on all cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from tide_bench.arms.base import ArmDevice, Timing
from tide_bench.arms.process import ArmError
from tide_bench.arms.stopwatch import Stopwatch
from tide_bench.report import cores

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def load_eager(folder: Path | PreTrainedModel, device: ArmDevice | None = None) -> PreTrainedModel:
    """The model on ``device`` (None: the processor) in eval mode, with end-of-sequence ids off, and torch on all cores.
    ``folder``: the model's, or a model that is there. Raises ArmError where torch sees no GPU."""
    device = device or ArmDevice()
    if device.is_gpu and not torch.cuda.is_available():
        raise ArmError(f"torch {torch.__version__} sees no GPU; install its build for CUDA (docs/gpu.md)")
    torch.set_num_threads(cores())
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = folder
    if isinstance(folder, Path):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[device.dtype]).eval().to(device.name)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0  # prompts have one length; without it `generate` requires one
    return model


class EagerArm:
    """`generate` with its default dynamic cache and SDPA attention."""

    def __init__(self, folder: Path | PreTrainedModel, device: ArmDevice | None = None) -> None:
        self.folder = folder
        self._device = device or ArmDevice()
        self.model: Any = load_eager(folder, self._device)

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Timing:
        """``options``: more arguments of HF's ``generate``, such as its ways to draft."""
        ids = torch.tensor(prompts, device=self._device.name)
        clock = _Clock(Stopwatch(self._device.name))
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=clock,
            **options,
        )
        tokens = output[:, ids.shape[1] :].tolist()
        # With drafts several tokens may come out first; the time of the others stands for all but one.
        before, first, *others = clock.watch.seconds()
        later = new_tokens - clock.counts[1] // len(prompts)
        return Timing(tokens, before + first, sum(others) * (new_tokens - 1) / max(1, later))


class _Clock(BaseStreamer):
    """Records when tokens are generated, and how many: first the prompt, then one step of all sequences at a time."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self.counts = list[int]()
        watch.mark()

    def put(self, value: torch.Tensor) -> None:
        self.watch.mark()
        self.counts.append(value.numel())

    def end(self) -> None:
        pass
