"""Documents of the task ``tide_python``: Python source that no demo model and no calibration of them has learned from."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer

from benchmarks.held_out import held_out_prompts
from benchmarks.models.model_folders import DEMO_MODELS


def pieces(count: int, tokens: int, **model: Any) -> dict[str, Dataset]:
    """``count`` pieces of ``tokens`` tokens of the demo models. ``model``: the model's arguments, as lm-eval passes them."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODELS / "layerskip" / "tokenizer.json"))
    found = held_out_prompts(count, tokens, "library")
    return {"test": Dataset.from_list([{"file": piece.file, "text": tokenizer.decode(piece.ids)} for piece in found])}
