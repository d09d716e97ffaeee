"""onnxruntime-genai: Microsoft's runtime for language models, on the same weights, built by its own model builder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

from tide_bench.arms.base import Timing
from tide_bench.arms.process import ArmError
from tide_bench.build_cache import cached_folder
from tide_bench.report import cores


def build_model_folder(weights: Path, identity: str, folder: Path, precision: str = "fp32") -> Path:
    """The genai model of the HuggingFace folder ``weights`` in fp32, int8 or int4 (rounded by the builder's own defaults).

    Raises RuntimeError with the builder's last line, and ArmError without the package.
    """
    try:
        builder = version("onnxruntime-genai")
    except PackageNotFoundError as error:
        raise ArmError("onnxruntime-genai is not installed; pip install 'tide-llm[bench]'") from error
    key = f"{identity}\nonnxruntime-genai {builder}, {precision}, cpu"
    return cached_folder(folder, key, lambda f: _build(weights, f, precision))


def _build(weights: Path, folder: Path, precision: str) -> None:
    with TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-i", str(weights), "-o", str(folder), "-p", precision, "-e", "cpu", "-c", scratch]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"onnxruntime-genai's model builder failed: {last}")


class GenaiArm:
    """The token loop of genai's own examples, on all cores; left alone it takes half of them.

    Its KV cache is made for exactly the requested tokens.
    """

    def __init__(self, folder: Path) -> None:
        import onnxruntime_genai as og

        self._og, self.folder = og, folder
        config = og.Config(str(folder))
        session = {"intra_op_num_threads": cores()}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = og.Model(config)

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Timing:
        ids = np.array(prompts, np.int32)
        rows, length = ids.shape
        params = self._og.GeneratorParams(self._model)
        most = length + new_tokens  # and at least as many: end-of-sequence ids are masked, an empty list of them has no effect
        params.set_search_options(batch_size=rows, min_length=most, max_length=most, do_sample=False)
        start = perf_counter()
        generator = self._og.Generator(self._model, params)
        generator.append_tokens(ids)
        generator.generate_next_token()
        first = perf_counter()
        for _ in range(new_tokens - 1):
            generator.generate_next_token()
        end = perf_counter()
        tokens = [[int(token) for token in generator.get_sequence(row)[length:]] for row in range(rows)]
        return Timing(tokens, first - start, end - first)
