"""Stub calibration directories: given exits with seeded random tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tide_runtime.bundle.calibration import CalibrationInfo, CertificateInfo, ExitInfo

from tide_export.calibration.calibration_file import CalibrationFile, DataInfo

CERTIFICATE = CertificateInfo(0.01, 0.95, "fixed-sequence testing", "document", 10_000, 50, 0.004, "ab" * 32, "2026-11-21")


def exit_tensors(info: ExitInfo, hidden: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Tensors of an exit, large enough that a missing one changes the outputs."""
    rng = np.random.default_rng(seed)
    router, translator = f"router.{info.checkpoint}", f"translator.{info.checkpoint}"
    shapes: dict[str, tuple[int, ...]] = {}
    if "score" in info.graph_outputs():
        shapes |= {f"{router}.down": (11, hidden), f"{router}.down_bias": (11,), f"{router}.up": (11,), f"{router}.up_bias": (1,)}
    if "hidden_out" in info.graph_outputs():
        shapes |= {f"{translator}.down": (7, hidden), f"{translator}.up": (hidden, 7)}
    return {name: (rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32) for name, shape in shapes.items()}


def write_calibration(directory: Path, exits: list[ExitInfo], fingerprint: str, layers: int, hidden: int) -> Path:
    """Write the files of tide-calibrate for a model of ``layers`` layers of ``hidden`` channels."""
    directory.mkdir(parents=True)
    info = CalibrationInfo(exits, 6, "exact", {"exact": 1.31, "exit": 1.52}, CERTIFICATE)
    data = DataInfo("texts/", 0, {"train": 3}, {"train": 900}, {"train": "ef" * 32})
    file = CalibrationFile(
        model="tiny", model_fingerprint=fingerprint, num_layers=layers, calibration=info, refusal="", data=data, heads=[],
        config={}, tools={}, date="2026-11-21",
    )  # fmt: skip
    file.write(directory)
    tensors = [exit_tensors(info, hidden, seed) for seed, info in enumerate(exits)]
    save_file({name: array for part in tensors for name, array in part.items()}, directory / "exits.safetensors")
    return directory
