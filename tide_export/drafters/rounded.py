"""A drafter whose matrices have 8 bits, whatever the model's have: a wrong draft costs time, never a token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tide_export.drafters.base import Drafter, positions_of
from tide_export.weights.quantized_weight import QuantizedWeight, symmetric_int8

_BLOCK = 32
_OWNER = "model"  # the attribute of the modules below, before the names of parameters


class RoundedDrafter:
    """``drafter``, which stays as it is: it may share modules with the model.

    Attributes:
        weights: parameter → its low-bit form, of each matrix of whole blocks.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.weights: Mapping[str, QuantizedWeight] = {
            f"{name}.weight": symmetric_int8(module.weight.detach().float().numpy(), _BLOCK)
            for name, module in drafter.named_modules()
            if isinstance(module, nn.Linear) and module.in_features % _BLOCK == 0
        }

    @torch.no_grad()
    def fuse(self, tapped: Tensor, rounded: bool) -> Tensor:
        """[B, S, D] of the model's states [B, S, len(taps) · H]; ``rounded``: by the rounded matrices."""
        return functional_call(FuseStep(self.drafter), self._values() if rounded else {}, (tapped,))

    @torch.no_grad()
    def guess(self, embedded: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, S, N] and states [B, S, D] of the first S pairs of texts."""
        return functional_call(_Guess(self.drafter), self._values(), (embedded, before))

    def _values(self) -> dict[str, Tensor]:
        dtypes = {name: parameter.dtype for name, parameter in self.drafter.named_parameters(remove_duplicate=False)}
        return {f"{_OWNER}.{n}": torch.from_numpy(w.dequantized()).to(dtypes[n]) for n, w in self.weights.items() if n in dtypes}


class FuseStep(nn.Module):
    """`Drafter.fuse` as a module."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.model = drafter

    def forward(self, tapped: Tensor) -> Tensor:
        fused = self.model.fuse(tapped).to(tapped.dtype)
        return fused.clone() if fused is tapped else fused  # a graph's output is not its input


class _Guess(nn.Module):
    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.model = drafter

    def forward(self, embedded: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(embedded, before, positions_of(before), None)
