"""The public predecessor (PyPI `tide-inference`, arXiv 2603.21365) as its README runs it, calibrated by its own calibrator."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoTokenizer

from tide_bench.arms.base import ArmDevice, Timing
from tide_bench.arms.eager import load_eager
from tide_bench.arms.process import ArmError
from tide_bench.arms.stopwatch import Stopwatch
from tide_bench.prompts import library_texts

_END = 2  # at this token its loop stops, whatever the tokenizer calls it
SAMPLES = 16  # texts of up to 512 tokens to calibrate on; its default of 2,000 takes a CPU long


class PredecessorArm:
    """Default configuration. It calibrates on text of the installed Python, as its own data set is not reachable everywhere."""

    def __init__(self, folder: Path, device: ArmDevice | None = None) -> None:
        try:
            import TIDE
        except ImportError as error:
            raise ArmError("the predecessor is not installed; pip install tide-inference") from error
        logging.getLogger("TIDE").setLevel(logging.WARNING)
        calibrator: Any = import_module("TIDE.calibrate")  # the package has a function of that name
        model, config = load_eager(folder, device), TIDE.TIDEConfig(calibration_samples=SAMPLES)
        calibrator._load_calibration_texts = lambda name, count: library_texts()[:count]
        self._device = (device or ArmDevice()).name
        self._watch = Stopwatch(self._device)
        with TemporaryDirectory() as scratch:
            router = Path(scratch) / "router.pt"
            calibrator.calibrate(model, _tokenizer(folder), config=config, save_path=str(router))
            self._runtime = TIDE.TIDE(model, str(router), config)
        sample = self._runtime._sample_next_token
        self._runtime._sample_next_token = lambda logits, *settings: sample(_without_end(logits), *settings)
        model.register_forward_hook(lambda *_: self._watch.mark())

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Timing:
        """The time to the first token ends with the prompt's pass, the rest with the last token's: it runs one pass too many."""
        ids, self._watch = torch.tensor(prompts, device=self._device), Stopwatch(self._device)
        self._watch.mark()
        output = self._runtime.generate(ids, max_new_tokens=new_tokens, temperature=0.0)
        first, *others = self._watch.seconds()
        return Timing(output[:, ids.shape[1] :].tolist(), first, sum(others[: new_tokens - 1]))


def _without_end(logits: torch.Tensor) -> torch.Tensor:
    """All arms write texts of one length, past any end."""
    return logits.index_fill(-1, torch.tensor([_END], device=logits.device), float("-inf"))


def _tokenizer(folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer
