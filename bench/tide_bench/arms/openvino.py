"""OpenVINO GenAI on a GGUF file, which its pipeline reads directly.

On a Q4_1 file its tokens differ from the dequantised weights' far more often than llama.cpp's do, with all precision hints at f32
too: the cause lies in how it reads the file, not in how it computes.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from tide_bench.arms.base import Timing
from tide_bench.arms.process import ArmError
from tide_bench.report import cores

_ALL_AT_ONCE = 2**20  # tokens of prompts in one step


class OpenvinoArm:
    """`LLMPipeline` on all cores, with paged attention; without its prefix cache, which would skip a prompt seen before."""

    def __init__(self, folder: Path) -> None:
        try:
            import openvino
            import openvino_genai
        except ImportError as error:
            raise ArmError("OpenVINO GenAI is not installed; pip install openvino-genai") from error
        self._genai = openvino_genai
        self._tensor = openvino.Tensor
        self.folder = folder
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = _ALL_AT_ONCE
        settings = {"INFERENCE_NUM_THREADS": cores(), "scheduler_config": scheduler}
        self._pipeline = openvino_genai.LLMPipeline(str(folder), "CPU", **settings)

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Timing:
        """The time to the first token is the pipeline's own figure, one for the whole batch."""
        config = self._genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        ids = np.array(prompts, np.int64)
        inputs = self._genai.TokenizedInputs(self._tensor(ids), self._tensor(np.ones_like(ids)))
        start = perf_counter()
        result = self._pipeline.generate(inputs, config)
        wall = perf_counter() - start
        first = max(result.perf_metrics.raw_metrics.m_times_to_first_token) / 1e6
        return Timing([list(row) for row in result.tokens], first, wall - first)
