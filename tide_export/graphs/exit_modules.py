"""The torch modules of exits: what a calibration trains, an export traces, and a package may add (docs/extending.md).

    head     states [..., H] → states [..., H], which the model's last layers, or its final norm and LM head, go on with
    router   ``scores(states [..., H], logits [..., V], total [...]) → [...]``, 0 … 1, where ``total`` is the logits' logsumexp;
             with ``reads_logits`` after the head was run, else before, with the states alone

All compute in float32. A package's are constructed with H and a seed. Their parameters are in exits.safetensors, with the prefix
``translator.{c}.`` or ``router.{c}.``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.errors import CalibrationError, ParamsError
from tide_runtime.plugins import EXTENSIONS, HEADS, ROUTERS, extension, installed, package_of
from torch import Tensor, nn
from torch.nn import functional as F

MAX_RANK = 128
ROUTER_WIDTH = 128
RMS_EPSILON = 1e-6
ExitTensors = Mapping[str, NDArray[np.float32]]


class Translator(nn.Module):
    """Computes h + up @ (down @ rmsnorm(h)), rmsnorm without weight; ``up`` starts at 0, so the map starts as the identity.

    The tuned lens (Belrose et al. 2023, arXiv:2303.08112, equation 8) with a low-rank matrix and a normed input.

    Args:
        hidden: H. ``down`` is [rank, H], ``up`` [H, rank].
        rank: 1 … 128, capped at H.
        seed: seed of ``down``'s initialization.
    """

    def __init__(self, hidden: int, rank: int = MAX_RANK, seed: int = 0) -> None:
        super().__init__()
        if not 1 <= rank <= MAX_RANK:
            raise ParamsError(f"the translator's rank must lie in 1 … {MAX_RANK}, got {rank}")
        rank = min(rank, hidden)
        generator = torch.Generator().manual_seed(seed)
        self.down = nn.Parameter(torch.randn((rank, hidden), generator=generator) * hidden**-0.5)
        self.up = nn.Parameter(torch.zeros(hidden, rank))

    def forward(self, states: Tensor) -> Tensor:
        """Map states [..., H] to [..., H], float32."""
        normed = F.rms_norm(states, states.shape[-1:], eps=RMS_EPSILON)
        return states + F.linear(F.linear(normed, self.down), self.up)


class MlpRouter(nn.Module):
    """Computes sigmoid(up · silu(down @ rmsnorm(h) + down_bias) + up_bias), rmsnorm without weight.

    Args:
        hidden: H. ``down`` is [R, H], ``down_bias`` [R], ``up`` [R], ``up_bias`` [1].
        width: R.
        seed: seed of the initialization; ``up`` starts at 0, so that every score starts at ½.
        kind: name of the scores in traces.
    """

    reads_logits = False

    def __init__(self, hidden: int, width: int = ROUTER_WIDTH, seed: int = 0, kind: str = "mlp") -> None:
        super().__init__()
        self.kind = kind
        generator = torch.Generator().manual_seed(seed)
        self.down = nn.Parameter(torch.randn((width, hidden), generator=generator) * hidden**-0.5)
        self.down_bias = nn.Parameter(torch.zeros(width))
        self.up = nn.Parameter(torch.zeros(width))
        self.up_bias = nn.Parameter(torch.zeros(1))

    def forward(self, states: Tensor) -> Tensor:
        """Log-odds [n] of the score for states [n, H]."""
        normed = F.rms_norm(states, states.shape[-1:], eps=RMS_EPSILON)
        return F.silu(F.linear(normed, self.down, self.down_bias)) @ self.up + self.up_bias

    def scores(self, states: Tensor, logits: Tensor | None = None, total: Tensor | None = None) -> Tensor:
        """Probability [n] that the exit's token is right; the exit head's logits are not needed."""
        return self(states).sigmoid()

    @torch.no_grad()
    def rescale(self, slope: float, offset: float) -> None:
        """Fold the map z → ``slope`` · z + ``offset`` of the log-odds into the last layer's weights."""
        self.up.mul_(slope)
        self.up_bias.mul_(slope).add_(offset)


@dataclass(frozen=True)
class ExitModules:
    """The modules of one exit with their weights; None for what it computes without any."""

    translator: nn.Module | None
    router: Any  # a module with ``scores``

    @classmethod
    def of(cls, info: ExitInfo, tensors: ExitTensors, hidden: int) -> ExitModules:
        """Those of ``info`` with the weights ``tensors``, named as in exits.safetensors.

        Raises CalibrationError where a package's weights do not fit its module, or another version of it is installed than the
        calibration used.
        """
        translator = router = None
        if info.head_package:
            translator = _of_package(HEADS, info.head, info.head_package, hidden)
        elif info.head != "identity":
            translator = Translator(hidden, len(tensors[f"translator.{info.checkpoint}.down"]))
        if info.router_package:
            router = _of_package(ROUTERS, info.router, info.router_package, hidden)
        elif info.has_mlp:
            router = MlpRouter(hidden, len(tensors[f"router.{info.checkpoint}.down"]))
        for part, module in (("translator", translator), ("router", router)):
            if module is not None:
                _load(module, f"{part}.{info.checkpoint}.", tensors)
        return cls(translator, router)


def _of_package(group: str, name: str, package: str, hidden: int) -> nn.Module:
    """The module registered as ``name``, for states of ``hidden`` numbers.

    Raises CalibrationError where it is missing, or its package is not ``package``, the name and version of the calibration's.
    """
    try:
        module_class = extension(group, name)
    except ParamsError as error:
        raise CalibrationError(f"the model was calibrated with {package}: {error}") from error
    found = package_of(installed(group)[name])
    if found != package:
        raise CalibrationError(
            f"the {EXTENSIONS[group]} {name} was calibrated with {package}, and {found} is installed; install that version, or "
            "calibrate the model again"
        )
    return module_class(hidden, seed=0)


def _load(module: nn.Module, prefix: str, tensors: ExitTensors) -> None:
    named = {name.removeprefix(prefix): torch.tensor(array) for name, array in tensors.items() if name.startswith(prefix)}
    try:
        module.load_state_dict(named)
    except RuntimeError as error:
        raise CalibrationError(f"the weights {prefix}* do not fit their module: {' '.join(str(error).split())}") from error
    module.eval().requires_grad_(False)
