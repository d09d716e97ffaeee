"""Writes the trained exit heads and routers to exits.safetensors (format: tide_export.calibration.exits_file)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from tide_calibrate.draft_head.head import DraftHead
from tide_calibrate.exit_heads import ExitHead
from tide_calibrate.routers import MlpRouter
from tide_export.calibration.exits_file import Arrays, write_exit_tensors


def write_exits(
    path: Path, heads: Mapping[int, ExitHead], routers: Mapping[int, MlpRouter], draft_head: DraftHead | None = None
) -> None:
    """Write the chosen head and router of each checkpoint, and the draft head if there is one.

    Raises OutputError when ``path`` cannot be written.
    """
    tensors: dict[str, NDArray[Any]] = {}
    if draft_head is not None:
        tensors |= {f"draft.{name}": np.ascontiguousarray(array) for name, array in draft_head.tensors().items()}
    for checkpoint, head in heads.items():
        if head.translator is not None:
            tensors |= _prefixed_tensors(f"translator.{checkpoint}", head.translator)
    for checkpoint, router in routers.items():
        tensors |= _prefixed_tensors(f"router.{checkpoint}", router)
    write_exit_tensors(path, tensors)


def _prefixed_tensors(prefix: str, module: nn.Module) -> Arrays:
    return {f"{prefix}.{name}": value.detach().float().contiguous().numpy() for name, value in module.state_dict().items()}
