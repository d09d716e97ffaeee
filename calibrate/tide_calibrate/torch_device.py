"""Where PyTorch runs a calibration: the device that is asked for, and the models on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tide_runtime.errors import TargetError

from tide_export.sources.loaded_model import LoadedModel


def checked_device(name: str) -> torch.device:
    """The device ``name`` (`CalibrationConfig.device`). Raises TargetError where PyTorch does not see it."""
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise TargetError(
            f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs, so there is no {name}; install its build for CUDA "
            "(docs/gpu.md), or calibrate with --device cpu"
        )
    return device


@contextmanager
def model_on(loaded: LoadedModel, device: torch.device) -> Iterator[None]:
    """The model on ``device``, afterwards back where it was.

    Its modules stay the same objects, so exits that were trained on it go on to work; what they trained is not moved.
    """
    before, _ = loaded.model.device, loaded.layers  # found by a pass in host memory, and kept
    _move(loaded, device)
    try:
        yield
    finally:
        _move(loaded, before)


def _move(loaded: LoadedModel, device: torch.device) -> None:
    leaves_gpu = loaded.model.device.type == "cuda" and device.type != "cuda"
    loaded.model.to(device)  # type: ignore[arg-type]
    if leaves_gpu:
        torch.cuda.empty_cache()  # what is measured meanwhile needs the room
