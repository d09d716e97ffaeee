"""exits.safetensors: the trained weights of a calibration, as named arrays that can be read without torch.

    translator.{c}: down [rank, H], up [H, rank]                         exit heads linear and tail:k
    router.{c}: down [R, H], down_bias [R], up [R], up_bias [1]          routers mlp and gate
    draft: fuse [H, 3H], gate_up [2I, H], down [H, I], rows [N, H], vocabulary [N] int64       draft head

All float32 but the vocabulary; c is the checkpoint. An exit with head ``identity`` has no translator. The head and the router of
a package have the parameters of their modules instead. The bytes depend on the arrays alone.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from tide_runtime.errors import CalibrationError, OutputError

Arrays = dict[str, NDArray[np.float32]]
PARTS = {"translator": ("down", "up"), "router": ("down", "down_bias", "up", "up_bias")}


@dataclass(frozen=True)
class ExitWeights:
    """Checkpoint → name → array, for each part; ``draft``: name → array. Names and shapes as in the file."""

    translators: dict[int, Arrays] = field(default_factory=dict)
    routers: dict[int, Arrays] = field(default_factory=dict)
    draft: dict[str, NDArray[Any]] = field(default_factory=dict)


def write_exit_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write named arrays. Raises OutputError if ``path`` cannot be written."""
    try:
        path.write_bytes(save(dict(sorted(tensors.items()))))
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def read_exits(path: Path, of_packages: Container[tuple[str, int]] = ()) -> ExitWeights:
    """Read and check exits.safetensors. Raises CalibrationError if it is missing, broken or incomplete.

    ``of_packages``: parts and checkpoints whose names and shapes are a package's, which are not checked here.
    """
    try:
        tensors = load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise CalibrationError(f"cannot read {path}: {error}; run tide-calibrate again") from error
    weights = ExitWeights()
    groups = {"translator": weights.translators, "router": weights.routers}
    for name, tensor in tensors.items():
        part, number, rest = (*name.split(".", 2), "", "")[:3]
        if part == "draft":
            weights.draft[number] = tensor
            continue
        if part not in groups or not number.isdecimal() or not rest:
            raise CalibrationError(f"{path} holds a tensor {name!r} that no part of a calibration has; run tide-calibrate again")
        if tensor.dtype != np.float32 or not np.isfinite(tensor).all():
            raise CalibrationError(f"{path}: {name} must be finite float32 numbers; run tide-calibrate again")
        groups[part].setdefault(int(number), {})[rest] = tensor
    for part in PARTS:
        for checkpoint, arrays in groups[part].items():
            if (part, checkpoint) not in of_packages:
                _check(path, part, checkpoint, arrays)
    if weights.draft:
        _check_draft(path, weights.draft)
    return weights


def _check(path: Path, part: str, checkpoint: int, arrays: Arrays) -> None:
    if set(arrays) != {*PARTS[part]}:
        raise CalibrationError(
            f"{path}: {part}.{checkpoint} needs {', '.join(sorted(PARTS[part]))}, it has {', '.join(sorted(arrays))}; "
            "run tide-calibrate again"
        )
    rows, columns = arrays["down"].shape if arrays["down"].ndim == 2 else (-1, -1)
    wanted = {"up": (columns, rows)} if part == "translator" else {"up": (rows,), "down_bias": (rows,), "up_bias": (1,)}
    for name, shape in wanted.items():
        if arrays[name].shape != shape:
            raise CalibrationError(
                f"{path}: {part}.{checkpoint}.{name} has shape {list(arrays[name].shape)}, expected {list(shape)} to fit down's; "
                "run tide-calibrate again"
            )


def _check_draft(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    hidden, inner = arrays["down"].shape if "down" in arrays and arrays["down"].ndim == 2 else (-1, -1)
    tokens = len(arrays.get("vocabulary", ()))
    wanted = {
        "fuse": (hidden, 3 * hidden),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "rows": (tokens, hidden),
        "vocabulary": (tokens,),
    }
    found = {name: array.shape for name, array in arrays.items()}
    finite = all(np.isfinite(array).all() for array in arrays.values())
    if found != wanted or arrays["vocabulary"].dtype != np.int64 or not finite:
        raise CalibrationError(f"{path}: draft has {found}, expected {wanted}, all finite; run tide-calibrate again")
