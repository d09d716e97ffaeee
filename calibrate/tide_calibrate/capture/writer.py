"""Write a capture batch by batch to memory-mapped files, and resume an interrupted one."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from tide_runtime.errors import CalibrationError, OutputError

from tide_calibrate.capture.store import PROGRESS_FILE, SETTINGS_FILE, array_path, hidden_name, read_json
from tide_calibrate.text.documents import Windows

HIDDEN_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_STORED: dict[str, type[Any]] = {"float16": np.float16, "bfloat16": np.uint16}  # numpy has no bfloat16
COMMIT_SECONDS = 10.0  # a sync takes about 10 ms per file; after every batch, syncs would take a tenth of the time


@dataclass(frozen=True)
class CaptureSettings:
    """Everything that determines a capture's bytes: SHA-256 of the stored weights and of the windows, and the options."""

    model: str
    data: str
    model_dtype: str
    num_layers: int
    hidden_size: int
    candidates: list[int]
    hidden_dtype: str
    top_k: int
    batch_size: int


class CaptureWriter:
    """The files of one capture of ``windows`` in ``directory``."""

    def __init__(self, directory: Path, settings: CaptureSettings, windows: Windows, split: NDArray[np.int8]) -> None:
        self.directory = directory
        self.settings = settings
        self.windows = windows
        self.split = split
        self._progress = {"done": 0, "batches": 0}
        self._committed = time.monotonic()

    @contextmanager
    def run(self, batches: int) -> Iterator[int]:
        """Create the files, or open those of an interrupted run; yields the number of finished batches.

        Raises CalibrationError when ``directory`` holds a capture with other settings, OutputError when the disk is too small.
        """
        self._progress["batches"] = batches
        if (self.directory / SETTINGS_FILE).exists():
            self._check_same(read_json(self.directory / SETTINGS_FILE))
            self._progress = read_json(self.directory / PROGRESS_FILE, "done", "batches")
        else:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._make_arrays()
            self._write_json(PROGRESS_FILE, self._progress)
            self._write_json(SETTINGS_FILE, asdict(self.settings))  # last: its existence marks the capture as resumable
        try:
            yield self._progress["done"]
        finally:
            self._commit()

    @contextmanager
    def batch(self, indices: NDArray[np.int64]) -> Iterator[BatchWriter]:
        """Write the windows ``indices``; after an exception the batch counts as not done."""
        yield BatchWriter(self, indices)
        self._progress["done"] += 1
        if time.monotonic() - self._committed > COMMIT_SECONDS:
            self._commit()

    def _commit(self) -> None:
        """Sync the arrays to disk, then record the progress, so that a run can resume even after a power failure."""
        for path in self.directory.glob("*.npy"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        self._write_json(PROGRESS_FILE, self._progress)
        self._committed = time.monotonic()

    def _make_arrays(self) -> None:
        windows, settings = self.windows, self.settings
        inputs = {"tokens": windows.tokens, "lengths": windows.lengths, "document": windows.document}
        for name, array in (inputs | {"split": self.split[windows.document]}).items():
            np.save(array_path(self.directory, name), array)
        shape = windows.tokens.shape
        stored = _STORED[settings.hidden_dtype]
        outputs: dict[str, tuple[tuple[int, ...], type[Any]]] = {
            "top_ids": ((*shape, settings.top_k), np.int32),
            "top_logits": ((*shape, settings.top_k), np.float32),
            "logsumexp": (shape, np.float32),
        }
        outputs |= {hidden_name(c): ((*shape, settings.hidden_size), stored) for c in settings.candidates}
        _check_space(self.directory, sum(math.prod(size) * np.dtype(dtype).itemsize for size, dtype in outputs.values()))
        for name, (size, dtype) in outputs.items():
            open_memmap(array_path(self.directory, name), mode="w+", dtype=dtype, shape=size)

    def _check_same(self, found: dict[str, Any]) -> None:
        wanted = asdict(self.settings)
        differ = [name for name in wanted if found.get(name) != wanted[name]]
        if differ:
            raise CalibrationError(
                f"{self.directory} holds another capture: "
                + "; ".join(f"{name} is {_short(found.get(name))}, now {_short(wanted[name])}" for name in differ)
                + "; give another directory, or --force to make this one anew"
            )

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        part = self.directory / f"{name}.part"
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(part, self.directory / name)


class BatchWriter:
    """Writes one batch's hidden states and logits; positions beyond a window's length stay zero in the files.

    Files are mapped anew for each batch, because mapped pages count as this process's memory.
    """

    def __init__(self, writer: CaptureWriter, indices: NDArray[np.int64]) -> None:
        self._writer, self._indices = writer, indices
        self._lengths = torch.from_numpy(writer.windows.lengths[indices])
        self._maps: dict[str, np.memmap] = {}

    def write_hidden(self, checkpoint: int, state: torch.Tensor) -> None:
        """Write ``state`` [B, T, H] after ``checkpoint`` layers. Raises CalibrationError for NaN, infinity or fp16 overflow, and
        where it is more than one residual stream."""
        settings = self._writer.settings
        if (streams := state.shape[-1] // settings.hidden_size) > 1:
            raise CalibrationError(
                f"the model's layers pass on {streams} residual streams of a token, and exits are trained on one; export it "
                "without a calibration"
            )
        valid = (torch.arange(state.shape[1]) < self._lengths[:, None]).to(state.device)
        _check_range(state if valid.all() else state[valid], checkpoint, settings)
        stored = state.to(HIDDEN_DTYPES[settings.hidden_dtype]).view(torch.int16).cpu().numpy()
        self._put(hidden_name(checkpoint), stored.view(_STORED[settings.hidden_dtype]), 0)

    def write_logits(self, start: int, logits: torch.Tensor) -> None:
        """Write the top K of ``logits`` [B, n, V] at positions ``start`` and up. Raises CalibrationError for NaN or infinity."""
        total = logits.logsumexp(-1)
        valid = (torch.arange(start, start + logits.shape[1]) < self._lengths[:, None]).to(logits.device)
        if not total[valid].isfinite().all():
            raise CalibrationError("the model's logits are NaN or infinite; check its weights, or load it with --dtype fp32")
        top = logits.topk(self._writer.settings.top_k)
        self._put("top_ids", top.indices.int().cpu().numpy(), start)
        self._put("top_logits", top.values.cpu().numpy(), start)
        self._put("logsumexp", total.cpu().numpy(), start)

    def _put(self, name: str, values: NDArray[Any], start: int) -> None:
        """Write values [B, n, …] to positions ``start`` and up, up to each window's length."""
        if name not in self._maps:
            self._maps[name] = open_memmap(array_path(self._writer.directory, name), mode="r+")
        for index, length, value in zip(self._indices, self._lengths.tolist(), values, strict=True):
            self._maps[name][index, start : min(length, start + len(value))] = value[: max(0, length - start)]


def _check_space(directory: Path, needed: int) -> None:
    """Raise OutputError unless ``needed`` bytes are free.

    The files are sparse until written, and writing a mapped page to a full disk kills the process with SIGBUS.
    """
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OutputError(
            f"the capture takes {needed / 2**30:.1f} GiB, but {directory} has {free / 2**30:.1f} GiB free; "
            "give a directory on another disk, fewer windows, or fewer candidate layers"
        )


def _check_range(state: torch.Tensor, checkpoint: int, settings: CaptureSettings) -> None:
    low, high = (float(x) for x in state.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        before = max((c for c in settings.candidates if c < checkpoint), default=0)
        raise CalibrationError(
            f"the hidden state after layer {checkpoint} is NaN or infinite (layers {before + 1} … {checkpoint} made it); "
            "check the model's weights, or load it with --dtype fp32"
        )
    if settings.hidden_dtype == "float16" and max(-low, high) > torch.finfo(torch.float16).max:
        raise CalibrationError(
            f"the hidden state after layer {checkpoint} reaches {max(-low, high):.3g}, "
            "more than float16 can hold (65504); capture in bfloat16"
        )


def _short(value: object) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 16 else str(value)
