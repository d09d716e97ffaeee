"""A stub calibration whose exits the GPU can evaluate by itself: MLP routers that accept half of the tokens, linear heads.

Nothing is trained: it shows that loops on the device and on the host take the same exits, not that the exits are accurate.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tide_calibrate.routers.mlp import MlpRouter
from tide_runtime.bundle.calibration import CalibrationInfo, CostTable, ExitInfo, StepCost

from tide_export.calibration.calibration_file import CalibrationFile, DataInfo
from tide_export.calibration.exit_calibration import ExitCalibration
from tide_export.load import LoadedModel, fingerprint

_RANK, _THRESHOLD = 8, 0.5
# Asking costs nothing, so that the host never rests from it: the device does not either.
_FREE = StepCost(rows=1, seq=1, launch_ms=0.0, layer_ms=1.0, head_ms=0.0, exit_ms=0.0, host_ms=0.0)
COSTS = CostTable(target="stub", machine="none", unsplit_ms=1.0, steps=[_FREE])


def stub_exits(loaded: LoadedModel, checkpoints: Sequence[int], texts: list[list[int]]) -> ExitCalibration:
    """An exit after each of ``checkpoints`` layers whose router accepts half of the tokens of ``texts`` [B][S]."""
    config = loaded.model.config.get_text_config()
    infos = [ExitInfo(at, "linear", "mlp", exact_threshold=_THRESHOLD, exit_threshold=_THRESHOLD) for at in checkpoints]
    file = CalibrationFile(
        model=loaded.source,
        model_fingerprint=fingerprint(loaded),
        num_layers=config.num_hidden_layers,
        calibration=CalibrationInfo(infos, draft_limit=4, recommended="exit", costs=COSTS),
        refusal="stub",
        data=DataInfo("none", 0, {}, {}, {}),
        heads=[],
        config={},
        tools={},
        date="",
    )
    tensors: dict[str, np.ndarray] = {}
    for checkpoint in checkpoints:
        tensors |= {f"router.{checkpoint}.{name}": array for name, array in _router(loaded, checkpoint, texts).items()}
        tensors |= {f"translator.{checkpoint}.{name}": array for name, array in _translator(config.hidden_size).items()}
    return ExitCalibration(Path(), file, tensors)


@torch.no_grad()
def _router(loaded: LoadedModel, checkpoint: int, texts: list[list[int]]) -> dict[str, np.ndarray]:
    """Random weights, others at each exit; the bias puts the median of the scores at ½."""
    router = MlpRouter(loaded.model.config.get_text_config().hidden_size)
    router.up.normal_(generator=torch.Generator().manual_seed(checkpoint))
    states = loaded.model(torch.tensor(texts), output_hidden_states=True).hidden_states[checkpoint]
    router.rescale(1.0, -float(router(states.float().flatten(0, 1)).median()))
    return {name: parameter.numpy() for name, parameter in router.named_parameters()}


def _translator(hidden: int) -> dict[str, np.ndarray]:
    """A small step in a random direction."""
    random = np.random.default_rng(0)
    shapes = {"down": (_RANK, hidden), "up": (hidden, _RANK)}
    return {name: (0.1 * random.normal(size=shape) * shape[1] ** -0.5).astype(np.float32) for name, shape in shapes.items()}
