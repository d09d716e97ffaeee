"""On-disk format of a capture: memory-mapped arrays, one row per window of text.

A window is up to ``T`` consecutive tokens of one document, padded on the right; ``lengths`` holds the number of valid tokens.
Values beyond a window's length are padding and must not be used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from tide_runtime.errors import CalibrationError

SETTINGS_FILE = "capture.json"  # model, data and options of the capture; written once all arrays exist
PROGRESS_FILE = "progress.json"  # number of finished batches, and of all batches


@dataclass(frozen=True)
class Capture:
    """Arrays of N windows of T tokens, all memory-mapped, so slicing reads only the selected windows.

    Args:
        tokens: [N, T] int32.
        lengths: [N] int32, valid tokens of each window.
        document: [N] int32, index of the document a window comes from.
        split: [N] int8, index into ("train", "threshold", "test"); equal for all windows of a document.
        hidden: layers run (a checkpoint, or L for the final state) → [N, T, H] float16, or bfloat16 stored as uint16
            (see ``hidden_dtype``): the residual stream before the next layer, before the final norm.
        hidden_dtype: "float16" or "bfloat16".
        top_ids, top_logits: [N, T, K], the full model's K largest logits at each token, largest first; int32, float32.
        logsumexp: [N, T] float32, over all of the full model's logits.
        num_layers: L.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    document: NDArray[np.int32]
    split: NDArray[np.int8]
    hidden: dict[int, NDArray[np.generic]]
    hidden_dtype: str
    top_ids: NDArray[np.int32]
    top_logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]
    num_layers: int


def array_path(directory: Path, name: str) -> Path:
    """Path of one array of a capture: a field of Capture, or ``hidden_CC``."""
    return directory / f"{name}.npy"


def hidden_name(checkpoint: int) -> str:
    return f"hidden_{checkpoint:02d}"


def read_json(path: Path, *fields: str) -> dict[str, Any]:
    """Read a JSON object with at least ``fields``. Raises CalibrationError when the file is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content | {field: content[field] for field in fields}
    except OSError as error:
        raise CalibrationError(f"{path.parent} holds no capture: {path.name} is missing; run tide-calibrate") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{path} is broken ({error}); delete {path.parent} and run tide-calibrate again") from error


def open_capture(directory: Path) -> Capture:
    """Open a finished capture for reading. Raises CalibrationError when it is missing, unfinished or broken."""
    settings = read_json(directory / SETTINGS_FILE, "candidates", "hidden_dtype", "num_layers")
    progress = read_json(directory / PROGRESS_FILE, "done", "batches")
    if progress["done"] < progress["batches"]:
        raise CalibrationError(
            f"the capture in {directory} stopped after {progress['done']} of {progress['batches']} batches; "
            "run tide-calibrate again with the same options: it goes on from there"
        )
    names = ("tokens", "lengths", "document", "split", "top_ids", "top_logits", "logsumexp")
    arrays: Mapping[str, Any] = {name: _open(directory, name) for name in names}
    hidden = {c: _open(directory, hidden_name(c)) for c in settings["candidates"]}
    return Capture(**arrays, hidden=hidden, hidden_dtype=settings["hidden_dtype"], num_layers=settings["num_layers"])


def states(capture: Capture, checkpoint: int, indices: Sequence[int] | NDArray[np.integer]) -> torch.Tensor:
    """Hidden states after ``checkpoint`` layers of the windows ``indices``, [n, T, H] float32; zero beyond a window's length."""
    stored = capture.hidden[checkpoint][np.asarray(indices)]
    if capture.hidden_dtype == "bfloat16":
        return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(stored).float()


def _open(directory: Path, name: str) -> NDArray[Any]:
    path = array_path(directory, name)
    try:
        return open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise CalibrationError(f"cannot read {path}: {error}; delete {directory} and run tide-calibrate again") from error
