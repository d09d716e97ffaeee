"""Stub calibration directories: given exits with seeded random tensors."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tide_runtime.bundle.calibration import CalibrationInfo, CertificateInfo, DraftHeadInfo, ExitInfo

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


def draft_tensors(hidden: int, vocabulary: int, vocab_size: int) -> dict[str, NDArray[np.generic]]:
    """Tensors of a draft head that guesses among every ``vocab_size // vocabulary``-th token."""
    rng, inner = np.random.default_rng(7), 2 * hidden
    shapes = {"fuse": (hidden, 3 * hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner), "rows": (vocabulary, hidden)}
    tensors: dict[str, NDArray[np.generic]] = {
        name: (rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32) for name, shape in shapes.items()
    }
    return tensors | {"vocabulary": np.arange(vocabulary, dtype=np.int64) * (vocab_size // vocabulary)}


def write_calibration(
    directory: Path,
    exits: list[ExitInfo],
    fingerprint: str,
    layers: int,
    hidden: int,
    draft: dict[str, NDArray[np.generic]] | None = None,
) -> Path:
    """Write the files of tide-calibrate for a model of ``layers`` layers of ``hidden`` channels; ``draft``: of a draft head."""
    directory.mkdir(parents=True)
    head = None
    if draft is not None:
        head = DraftHeadInfo([layers // 2, layers], 2 * hidden, len(draft["vocabulary"]), [0.5, 0.4], [[0.0, 0.2], [0.5, 0.8]])
    info = CalibrationInfo(exits, 6, "exact", {"exact": 1.31, "exit": 1.52}, CERTIFICATE, draft_head=head)
    data = DataInfo("texts/", 0, {"train": 3}, {"train": 900}, {"train": "ef" * 32})
    file = CalibrationFile(
        model="tiny", model_fingerprint=fingerprint, num_layers=layers, calibration=info, refusal="", data=data, heads=[],
        config={}, tools={}, date="2026-11-21",
    )  # fmt: skip
    file.write(directory)
    tensors = [exit_tensors(info, hidden, seed) for seed, info in enumerate(exits)]
    named = {name: array for part in tensors for name, array in part.items()}
    named |= {f"draft.{name}": array for name, array in (draft or {}).items()}
    save_file(named, directory / "exits.safetensors")
    return directory
