"""HF eager as the reference for tokens: its greedy continuations, and the gap of logits where another arm differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tide_bench.arms.eager import load_eager

NEAR_TIE = 1e-4  # logits closer than this may change places with the order of a sum
ROWS = 25  # prompts continued at once


class EagerReference:
    """The model in ``folder`` in fp32."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = load_eager(folder)

    @torch.inference_mode()
    def continuations(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Greedy, end-of-sequence ids ignored. ``prompts`` have one length, so batches need no padding."""
        tokens: list[list[int]] = []
        for start in range(0, len(prompts), ROWS):
            ids = torch.tensor(prompts[start : start + ROWS])
            output = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
            tokens += output[:, ids.shape[1] :].tolist()
        return tokens

    @torch.inference_mode()
    def gap(self, text: Sequence[int], one: int, other: int) -> float:
        """Distance of two tokens' logits behind ``text``."""
        logits = self._model(torch.tensor([list(text)])).logits[0, -1]
        return float((logits[one] - logits[other]).abs())
