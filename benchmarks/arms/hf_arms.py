"""Ways to decode with torch as arms: HuggingFace's own, with and without drafts, and the predecessor.

Each has a process of its own and few prompts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tide_bench.arms import REFERENCE
from tide_bench.arms.process import ArmProcess
from tide_runtime import GenerationParams

from benchmarks.arms.turns import Group, Turn

SETTLE_S = 0.3  # thread pools spin for a while after their last work
PREDECESSOR = "predecessor"
HF_GROUPS = 4  # eager is several times slower than everything else


def hf_options(arm: str, exit_layer: int) -> dict[str, Any]:
    """Arguments of ``generate`` that make the arm. ``exit_layer``: layers that `early_exit` drafts with."""
    return {
        "eager": {},
        "prompt_lookup": {"prompt_lookup_num_tokens": 10},  # HF's documentation, "Prompt lookup decoding"
        "early_exit": {"assistant_early_exit": exit_layer},
        PREDECESSOR: {},
    }[arm]


class HFArm:
    """``model.generate(…, **options)``, greedy, in fp32. ``kind``: of `tide_bench.arms.ARMS`; ArmError where it is missing."""

    most_groups: int | None = HF_GROUPS

    def __init__(self, weights: Path, options: Mapping[str, Any], kind: str = REFERENCE) -> None:
        self.process = ArmProcess(kind, weights)
        self._options = options

    def turn(self, prompts: Group, params: GenerationParams, rows: int) -> Turn:
        """HF's batches are fixed: one after the other. Raises ArmError when HF's ``generate`` fails."""
        tokens, seconds = list[list[int]](), 0.0
        time.sleep(SETTLE_S)
        for start in range(0, len(prompts), rows):
            batch = [list(prompt) for prompt in prompts[start : start + rows]]
            timing = self.process.generate(batch, params.max_new_tokens, **self._options)
            tokens, seconds = tokens + timing.tokens, seconds + timing.decode_s
        time.sleep(SETTLE_S)
        return Turn(tokens, seconds)

    def close(self) -> None:
        self.process.close()
