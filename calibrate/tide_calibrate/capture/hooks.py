"""Forward hooks that read the residual stream between a model's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tide_export.trace import decoder_layers

Take = Callable[[int, torch.Tensor], None]


@contextmanager
def hidden_states(model: PreTrainedModel, boundaries: Sequence[int], take: Take) -> Iterator[None]:
    """While active, call ``take(c, hidden [B, T, H])`` in every forward pass, for each boundary c: after ``c`` layers.

    Boundary L is after the last layer, before the final norm (transformers' last ``output_hidden_states`` is after the norm).
    """
    layers = decoder_layers(model)
    with ExitStack() as hooks:
        for boundary in boundaries:
            hook = _hook(layers, boundary, take)
            hooks.callback(hook.remove)
        yield


def _hook(layers: nn.ModuleList, boundary: int, take: Take) -> torch.utils.hooks.RemovableHandle:
    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(boundary, args[0] if args else kwargs["hidden_states"])

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        take(boundary, output[0] if isinstance(output, tuple) else output)

    if boundary == len(layers):
        return layers[-1].register_forward_hook(after)
    return layers[boundary].register_forward_pre_hook(before, with_kwargs=True)
