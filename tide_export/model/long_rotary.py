"""Rotary embeddings with two sets of factors: short ones for texts that fit the original context, long ones for longer texts
(LongRoPE, Ding et al. 2024, https://arxiv.org/abs/2402.13753).

transformers chooses one set for a whole pass, by its largest position. A step of the runtime holds texts of both kinds, so a
traced graph has both sets: position p of a short text has the id p, that of a long text p + the original context's length
(`Manifest.long_rotary_from`). cos and sin are then a function of the position id alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tide_runtime.errors import UnsupportedModelError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE = "longrope"


def long_rotary_from(model: PreTrainedModel) -> int | None:
    """Tokens of the longest text that takes the short factors; None where the model has one set.

    Raises UnsupportedModelError where the model's own code gives other angles than `BothFactors`.
    """
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if parameters.get("rope_type") != LONGROPE:
        return None
    modules = _rotary_modules(model)
    original = parameters["original_max_position_embeddings"]
    if not modules or not all(_is_known(module, original) for module in modules.values()):
        names = ", ".join(sorted({type(module).__name__ for module in modules.values()})) or "of unknown class"
        raise UnsupportedModelError(
            f"{type(model).__name__} is not supported, because its rotary embedding ({names}) computes the angles of long texts "
            "in another way than transformers' longrope"
        )
    return original


@contextmanager
def both_factors(model: PreTrainedModel) -> Iterator[None]:
    """Context in which rotary embeddings of two sets of factors take both, by position id; others stay as they are."""
    original = long_rotary_from(model)
    modules = _rotary_modules(model) if original is not None else {}
    for name, module in modules.items():
        model.set_submodule(name, BothFactors(module, original))
    try:
        yield
    finally:
        for name, module in modules.items():
            model.set_submodule(name, module)


class BothFactors(nn.Module):
    """The rotary embedding ``rotary`` of transformers, for position ids as described above; cos and sin in the dtype of ``x``."""

    def __init__(self, rotary: nn.Module, original: int) -> None:
        super().__init__()
        frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](rotary.config, torch.device("cpu"), seq_len=original + 1)
        self.short, self.long = _fixed(rotary, rotary.original_inv_freq), _fixed(rotary, frequencies)
        self.original = original

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        wide = torch.empty(0, device=x.device)  # of no values: it tells the modules that cos and sin stay in float32
        tables = zip(self.short(wide, position_ids), self.long(wide, position_ids - self.original), strict=True)
        is_short = (position_ids < self.original)[..., None]
        return tuple(torch.where(is_short, short, long).to(x.dtype) for short, long in tables)


def _fixed(rotary: nn.Module, frequencies: Tensor) -> nn.Module:
    """A copy of ``rotary`` with ``frequencies``, whatever the positions."""
    module = copy.copy(rotary)
    module._buffers = {**rotary._buffers, "inv_freq": frequencies}
    module.rope_type = "default"
    return module


def _rotary_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if getattr(module, "rope_type", None) == LONGROPE}


@torch.no_grad()
def _is_known(module: nn.Module, original: int) -> bool:
    """Whether `BothFactors` gives a long and a short text together the angles that the module gives each alone."""
    if "original_inv_freq" not in module._buffers:
        return False
    x = torch.empty(0)
    long = torch.tensor([[0, 1, original]])
    short = torch.tensor([[0, 1, original - 1]])
    together = BothFactors(module, original)(x, torch.cat([long + original, short]))
    alone = zip(module(x, long), module(x, short), strict=True)  # the short one last: the module keeps its latest frequencies
    return all(torch.equal(ours, torch.cat(own)) for ours, own in zip(together, alone, strict=True))
