"""The exit gate that a looped model was trained with, as the router of exits at the ends of its loops: no calibration is needed.

Ouro's gate (arXiv:2510.25741, section 3) is a linear layer on the normed state after a loop, whose sigmoid is the probability to
leave there. With z = gate · norm(h) + bias and silu(z) - silu(-z) = z, the MLP router of `exit_graphs` computes it exactly:

    down = ±(gate ∘ weight of the norm), down_bias = ±bias, up = (1, -1), up_bias = 0

The head of these exits is the model's own: each loop ends in the norm that the head reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from transformers import PreTrainedModel

from tide_export.config import loop_ends
from tide_export.model.looped_models import GATE, OuroForCausalLM
from tide_export.sources.loaded_model import LoadedModel

# An earlier loop costs a fraction of a pass and is right more often than not, so `exact` drafts with the first whatever its gate
# says, as many tokens as the track record of a text allows.
_EXACT_THRESHOLD = 0.0
_DRAFT_LIMIT = 4


@dataclass(frozen=True)
class OwnExits:
    """What an export takes from a calibration, for exits that need none; ``tensors`` have the names of exits.safetensors."""

    info: CalibrationInfo
    tensors: Mapping[str, NDArray[np.float32]]
    draft: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def check(self, loaded: LoadedModel) -> None:
        """They were made of the model itself."""

    def keep_report(self, bundle: Path) -> None:
        """There is none."""


def own_exits(loaded: LoadedModel) -> OwnExits | None:
    """Exits at the ends of all loops but the last, whose router is the model's gate; None for a model without one."""
    gate = gate_router(loaded)
    if gate is None:
        return None
    ends = loop_ends(loaded.num_layers, loaded.loops)
    exits = [ExitInfo(end, "identity", "gate", exact_threshold=_EXACT_THRESHOLD) for end in ends]
    tensors = {f"router.{end}.{name}": array for end in ends for name, array in gate.items()}
    return OwnExits(CalibrationInfo(exits, _DRAFT_LIMIT, recommended="exact"), tensors)


def gate_router(loaded: LoadedModel) -> dict[str, NDArray[np.float32]] | None:
    """The gate as an MLP router: down [2, H], down_bias [2], up [2], up_bias [1]. None: the model has none, or one loop."""
    if not isinstance(loaded.model, OuroForCausalLM) or loaded.loops < 2:
        return None
    names = (f"model.{GATE}.weight", f"model.{GATE}.bias", "model.norm.weight")
    weight, bias, norm = (loaded.parameters.value(name).float() for name in names)
    row = weight[0] * norm
    router = {
        "down": torch.stack([row, -row]),
        "down_bias": torch.cat([bias, -bias]),
        "up": torch.tensor([1.0, -1.0]),
        "up_bias": torch.zeros(1),
    }
    return {name: tensor.cpu().numpy() for name, tensor in router.items()}


def own_threshold(model: PreTrainedModel) -> float | None:
    """The cumulated probability of the gate from which on a token leaves; None for a model without a gate."""
    if not isinstance(model, OuroForCausalLM):
        return None
    threshold = model.config.early_exit_threshold
    return 1.0 if threshold is None else float(threshold)
