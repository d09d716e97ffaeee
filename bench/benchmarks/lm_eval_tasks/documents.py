"""Documents that lie beside the task files, loaded without a download or a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

_FOLDER = Path(__file__).resolve().parent


def stored(file: str, **model: Any) -> dict[str, Dataset]:
    """The JSON lines of ``file`` in this folder. ``model``: the model's arguments, which lm-eval passes to every data set."""
    lines = (_FOLDER / file).read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
