"""Logits of an engine with LoRA adapters against those of PEFT on PyTorch. It reads the logits of steps, and times nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tide_runtime import Engine

RANK, NAMES = 16, ("first", "second", "third")


def peft_logits(weights: Path, folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, list[NDArray[np.float32]]]:
    """Write an adapter for each of `NAMES` into ``folder``, and return the logits [tokens, V] of the prompts with it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    found = {}
    for seed, name in enumerate(NAMES):
        torch.manual_seed(seed)
        config = LoraConfig(r=RANK, lora_alpha=RANK // 2, target_modules="all-linear", init_lora_weights=False)
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32), config).eval()
        adapted.save_pretrained(str(folder / name))
        with torch.no_grad():
            found[name] = [adapted(input_ids=torch.tensor([[*prompt]])).logits[0].numpy() for prompt in prompts]
    return found


def logit_error(engine: Engine, prompts: Sequence[Sequence[int]], wanted: Mapping[str, Sequence[NDArray[np.float32]]]) -> float:
    """The largest difference of a logit of the ``prompts``, which run together, to ``wanted``."""
    error, context = 0.0, engine.backend.context(len(prompts))
    for number, name in enumerate(wanted, 1):
        context.adapters[:] = [number] * len(prompts)
        counts = [len(prompt) for prompt in prompts]
        step = context.step(0, counts, counts)
        step.input_ids[: sum(counts)] = np.concatenate(prompts)
        step.place([0] * len(prompts))
        step.run_all(context.every_layer)
        error = max(error, float(np.abs(step.logits[: sum(counts)] - np.concatenate(wanted[name])).max()))
    context.close()
    return error
